"""The alerts: each fires when it should, is silent when it should, resolves, and leads to a page that helps."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.grafana.dashboards import texts
from ddpdebug.schema.row import Row
from tools import alerts
from tools.documentation import metric_names

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "prometheus" / "rules"
FILES = [FOLDER / alerts.RECORDING_FILE, FOLDER / alerts.ALERTS_FILE]
CASES = Path(__file__).parent / "rules_test.yml"
RULES: list[dict[str, Any]] = [
    rule for file in FILES for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
_SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]


@pytest.mark.smoke
def test_promtool_accepts_the_rules(need: Callable[[str], str]) -> None:
    """And the cases below fire, stay silent and resolve."""
    for words in (["check", "rules", *FILES], ["test", "rules", CASES]):
        result = subprocess.run([need("promtool"), *words], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_the_committed_alerts_are_those_of_the_code() -> None:
    """`make rules` would change nothing, neither for Prometheus nor for the cluster."""
    recording, alerting = (file.read_text(encoding="utf-8") for file in FILES)
    assert alerting == alerts.alerting_text(), "run make rules"
    cluster = (ROOT / "deploy" / "kubernetes" / "base" / "prometheusrule.yaml").read_text(encoding="utf-8")
    assert cluster == alerts.cluster_text(recording, alerting), "run make rules"


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_cases(name: str) -> None:
    """One in which it fires, and one before and after it in which it does not."""
    fires, silent = [], []
    for group in yaml.safe_load(CASES.read_text())["tests"]:
        for case in group.get("promql_expr_test", ()):
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
    """Severity, a summary with the run's name and id, a description, an absolute link to a runbook that is there."""
    rule = ALERTS[name]
    assert re.fullmatch(r"Ddpdebug([A-Z][a-z]+)+", name)
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    notes = rule["annotations"]
    for text in (notes["summary"], notes["description"]):
        assert "run {{ $labels.run }} ({{ $labels.run_id }})" in text
    assert len(notes["description"]) > 60
    assert notes["runbook_url"] == f"{alerts.RUNBOOKS}{name}.md"
    page = (ROOT / "docs" / "runbooks" / f"{name}.md").read_text(encoding="utf-8")
    head, *parts = re.split(r"^## ", page, flags=re.MULTILINE)
    assert head.strip() == f"# {name}"
    assert [part.partition("\n")[0] for part in parts] == _SECTIONS
    assert all(len(part.partition("\n")[2].strip()) > 60 for part in parts)


def test_the_table_of_alerts_is_true() -> None:
    """Each alert stands in docs/monitoring.md, with its severity and the time that it waits."""
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\(runbooks/(\w+)\.md\) \| (\w+) \| (\w+|at once) \| .+ \|$", page, re.MULTILINE)
    table = {name: (target, severity, wait) for name, target, severity, wait in rows}
    assert len(table) == len(rows)
    assert table == {
        name: (name, rule["labels"]["severity"], rule.get("for", "at once")) for name, rule in ALERTS.items()
    }


def test_there_is_no_runbook_without_an_alert() -> None:
    """A renamed alert takes its page along."""
    assert {path.stem for path in (ROOT / "docs" / "runbooks").iterdir()} - {"README"} == {*ALERTS}


def test_only_metrics_that_exist_are_watched() -> None:
    """Served by the exporter, or recorded by a rule of the same file."""
    known = metric_names()
    if "host_limit_bytes" not in Row._fields:
        known |= {"ddpdebug_host_memory_limit_bytes", "ddpdebug_device_memory_limit_bytes"}
    # rank 0 tells of all ranks of a large world in the same words
    known |= {name.replace("ddpdebug_", "ddpdebug_all_ranks_", 1) for name in known}
    known |= {f"ddpdebug_all_ranks_mean_{what}_seconds" for what in ("phase", "own", "straggler_cost")}
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    used = {name for rule in RULES for name in re.findall(r"(?:\w+:)?ddpdebug_[\w:]+", rule["expr"])}
    assert used - known - recorded == set()
    drawn = {name for text in texts().values() for name in re.findall(r"(?:\w+:)?ddpdebug_[\w:]+", text)}
    assert recorded <= used | drawn
    asked = {
        name for rule in ALERTS.values() for name in re.findall(r"(?:\w+:)?ddpdebug_[\w:]+", str(rule["annotations"]))
    }
    assert asked - known - recorded == {"ddpdebug_docs"}


def test_no_alert_joins_runs_or_lives_longer_than_its_run() -> None:
    """An alert names a run, reads no series of another one, and is about a run that lives or has just ended."""
    for name, rule in ALERTS.items():
        assert "ddpdebug_run_info" not in rule["expr"], name
        if not re.match(r"Ddpdebug(Run|Finding)", name):
            assert rule["expr"].endswith("and on (run_id) run:ddpdebug_ranks_running:count"), name
    ended = {name for name in ALERTS if re.match(r"Ddpdebug(Run|Finding)", name)}
    assert all("[15m]" in ALERTS[name]["expr"] or "last15m" in ALERTS[name]["expr"] for name in ended)
