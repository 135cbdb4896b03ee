"""The alerts: each fires when it should, is silent when it should, resolves, and leads to a page that helps."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.schema.row import Row
from tools.documentation import metric_names

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "deploy" / "prometheus" / "rules" / "ddpdebug.yml"
CASES = Path(__file__).parent / "rules_test.yml"
RULES: list[dict[str, Any]] = [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
_SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]


def test_promtool_accepts_the_rules(need: Callable[[str], str]) -> None:
    """And the cases below fire, stay silent and resolve."""
    for words in (["check", "rules", FILE], ["test", "rules", CASES]):
        result = subprocess.run([need("promtool"), *words], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_cases(name: str) -> None:
    """One in which it fires, and one before and after it in which it does not."""
    fires, silent = [], []
    for group in yaml.safe_load(CASES.read_text())["tests"]:
        for case in group["promql_expr_test"]:
            minute = int(case["eval_time"].removesuffix("m"))
            samples = " ".join(sample["labels"] for sample in case["exp_samples"])
            concerned = name in case["expr"] or "alertname" not in case["expr"]
            if f'"{name}"' in samples:
                fires.append((group["name"], minute))
            elif concerned:
                silent.append((group["name"], minute))
    assert fires
    for test, minute in fires:
        others = [other for same, other in silent if same == test]
        if min(others) < minute < max(others):
            return
    pytest.fail(f"{name} has no case in which it is silent, fires, and is silent again")


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_what_happened_and_what_to_do(name: str) -> None:
    """Severity, a summary that names the run, a description, and a runbook without an empty section."""
    rule = ALERTS[name]
    assert re.fullmatch(r"Ddpdebug([A-Z][a-z]+)+", name)
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    notes = rule["annotations"]
    assert "{{ $labels.run_id }}" in notes["summary"]
    assert len(notes["description"]) > 60
    assert notes["runbook_url"] == f"{{{{ $externalLabels.ddpdebug_docs }}}}docs/runbooks/{name}.md"
    page = (ROOT / "docs" / "runbooks" / f"{name}.md").read_text(encoding="utf-8")
    head, *parts = re.split(r"^## ", page, flags=re.MULTILINE)
    assert head.strip() == f"# {name}"
    assert [part.partition("\n")[0] for part in parts] == _SECTIONS
    assert all(len(part.partition("\n")[2].strip()) > 60 for part in parts)


def test_there_is_no_runbook_without_an_alert() -> None:
    """A renamed alert takes its page along."""
    assert {path.stem for path in (ROOT / "docs" / "runbooks").iterdir()} == {*ALERTS}


def test_only_metrics_that_exist_are_watched() -> None:
    """Served by the exporter, or recorded by a rule of the same file."""
    known = metric_names()
    if "host_limit_bytes" not in Row._fields:
        known |= {"ddpdebug_host_memory_limit_bytes", "ddpdebug_device_memory_limit_bytes"}
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    used = {name for rule in RULES for name in re.findall(r"(?:\w+:)?ddpdebug_[\w:]+", rule["expr"])}
    assert used - known - recorded == set()
    assert recorded <= used
