"""`ddpdebug verdict`: exit codes from a run directory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.commands import main
from ddpdebug.schema.finding import Finding, Severity

_FINDING = Finding(code="RANK101", severity=Severity.ERROR, title="parameters differ", step=3, ranks=(1,))


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE", "CI_PROJECT_DIR"):
        monkeypatch.delenv(name, raising=False)


def _run(folder: Path, outcomes: dict[int, Any], findings: Sequence[Finding] = (), **check: Any) -> Path:
    """Write a run directory of two ranks as ranks and `check` do."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run": "r", "world": 2, "command": ["t.py"]}), encoding="utf-8")
    (folder / "findings.jsonl").write_text("".join(f.to_json() + "\n" for f in findings), encoding="utf-8")
    for rank, outcome in outcomes.items():
        own = folder / "ranks" / str(rank)
        own.mkdir(parents=True)
        text = outcome if isinstance(outcome, str) else json.dumps({"run": "r", "rank": rank, **outcome})
        (own / "outcome.json").write_text(text, encoding="utf-8")
    if check:
        record = {"run": "r", "world": 2, "timed_out": False, "statuses": {}, "places": {}, **check}
        (folder / "check.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


_FINE = {"reason": "finished", "exit_code": 0, "steps": {"0": 5}}
_BAD = {"reason": "exception: ValueError: x", "exit_code": 1, "steps": {"0": 5}}


@pytest.mark.parametrize(
    "outcomes, more, code",
    [
        ({0: _FINE, 1: _FINE}, {}, 0),
        ({0: _FINE, 1: _FINE}, {"findings": [_FINDING]}, 1),
        ({0: _FINE, 1: _BAD}, {}, 3),
        ({0: _FINE}, {}, 4),
        ({}, {}, 4),
        ({0: _FINE, 1: "{"}, {}, 4),
        ({0: _FINE, 1: {**_FINE, "run": "another"}}, {}, 4),
        ({0: _FINE, 1: {"reason": "finished", "exit_code": "x"}}, {}, 4),
        ({0: _FINE}, {"timed_out": True, "places": {"1": "in train.py:3 (main)"}}, 4),
        ({0: _FINE}, {"statuses": {"1": -9}}, 4),
        ({0: _FINE}, {"statuses": {"1": 5}}, 3),
        ({0: _FINE}, {"statuses": {"0": 0, "1": 0}}, 0),
    ],
)
def test_exit_code(
    outcomes: dict[int, Any], more: dict[str, Any], code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The codes are those of `check`; a missing or incomplete report is never clean."""
    folder = _run(tmp_path / "run", outcomes, **more)
    assert main(["verdict", str(folder), "--json", "v.json"]) == code
    assert f"(exit {code})" in capfd.readouterr().out
    record = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert record["exit_code"] == code
    if "places" in more:
        assert record["ranks"]["1"]["reason"] == "did not end in time: in train.py:3 (main)"


def test_threshold(tmp_path: Path) -> None:
    """`--fail-on` is asked anew."""
    folder = _run(tmp_path / "run", {0: _FINE, 1: _FINE}, [_FINDING])
    assert main(["verdict", str(folder), "--fail-on", "critical"]) == 0
    assert main(["verdict", str(folder), "--fail-on", "warning"]) == 1


@pytest.mark.parametrize(
    "outcomes, findings, code, words",
    [
        ({0: _FINE, 1: _FINE}, [], 0, ""),
        ({0: _FINE, 1: _BAD}, [], 1, "the script failed by itself"),
        ({0: _FINE}, [], 0, ""),  # one that was lost, and nobody knows why
        ({0: _FINE, 1: _FINE}, [_FINDING], 1, "RANK101 (deterministic): no: "),
        ({0: _FINE, 1: _BAD}, [replace(_FINDING, code="FAIL1022")], 0, "FAIL1022 (transient): probably"),
        ({0: _FINE, 1: _BAD}, [replace(_FINDING, code="FAIL1022"), _FINDING], 1, "RANK101"),
        ({0: _FINE, 1: _FINE}, [replace(_FINDING, severity=Severity.WARNING)], 0, ""),
    ],
)
def test_restart(
    outcomes: dict[int, Any],
    findings: list[Finding],
    code: int,
    words: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A launcher learns by the exit status whether it is worth it to start the job again, and a person why."""
    folder = _run(tmp_path / "run", outcomes, findings)
    assert main(["verdict", str(folder), "--restart", "--json", "v.json"]) == code
    told = capfd.readouterr().out
    assert told.startswith(f"restart: {'no' if code else 'yes'}\n")
    assert words in told
    assert (tmp_path / "v.json").exists()


def test_a_restart_after_findings_that_cannot_be_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody knows whether it helps."""
    folder = _run(tmp_path / "run", {0: _FINE, 1: _FINE})
    (folder / "findings.jsonl").write_text("{\n", encoding="utf-8")
    assert main(["verdict", str(folder), "--restart"]) == 4
    assert capfd.readouterr().out.startswith("restart: unknown\n")


def test_reports_over_the_network_count(tmp_path: Path) -> None:
    """A rank on a node with other disks is known by what it told rank 0 when it ended."""
    folder = _run(tmp_path / "run", {0: _FINE})
    value = {"steps": {"0": 5}, "reason": "finished"}
    fact = {"rows": 0, "kind": "fact", "payload": {"rank": 1, "kind": "fact", "topic": "end", "value": value}}
    (folder / "observations.jsonl").write_text(json.dumps(fact) + "\n", encoding="utf-8")
    assert main(["verdict", str(folder)]) == 0
    fact["payload"]["value"] = {"steps": {}, "reason": "exception: ValueError: x"}  # type: ignore[index]
    (folder / "observations.jsonl").write_text(json.dumps(fact) + "\n", encoding="utf-8")
    assert main(["verdict", str(folder)]) == 3


def test_nobody_reported(tmp_path: Path) -> None:
    """An empty folder is no run; one that ranks were started in is judged by what the starter saw of them."""
    (tmp_path / "empty").mkdir()
    assert main(["verdict", "empty"]) == 2
    folder = _run(tmp_path / "run", {}, statuses={"0": 1, "1": 1})
    (folder / "run.json").unlink()
    assert main(["verdict", "run"]) == 3


def test_account_of_another_run_is_ignored(tmp_path: Path) -> None:
    """A directory that was used again by `run` is judged by the newer run's files."""
    folder = _run(tmp_path / "run", {0: _FINE, 1: _FINE}, run="older", timed_out=True)
    assert main(["verdict", str(folder)]) == 0


@pytest.mark.parametrize("words", [["none"], ["src"], ["file"], [], ["run", "--junit", "."]])
def test_wrong_usage(words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is no run directory is wrong usage, not a verdict."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    (tmp_path / "file").touch()
    _run(tmp_path / "run", {0: _FINE, 1: _FINE})
    assert main(["verdict", *words]) == 2
    assert capfd.readouterr().err.startswith("ddpdebug: error: ")


def test_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """All files are written, the summary is added to GitHub's, and errors are annotated there."""
    folder = _run(tmp_path / "run", {0: _FINE, 1: _FINE}, [_FINDING])
    (tmp_path / "summary.md").write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    files = ("--junit", "v.xml", "--json", "v.json", "--markdown", "v.md", "--codequality", "q.json")
    assert main(["verdict", str(folder), *files]) == 1
    out = capfd.readouterr().out
    assert out.startswith("::error title=RANK101 parameters differ::")
    annotations = [line for line in out.splitlines() if line.startswith("::")]
    assert len(annotations) == 2
    assert annotations[1].startswith("::warning title=ddpdebug%3A not")  # nothing here says what was looked at
    text = (tmp_path / "v.md").read_text(encoding="utf-8")
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == f"before\n{text}"
    assert json.loads((tmp_path / "q.json").read_text(encoding="utf-8"))[0]["location"]["path"] == "t.py"


@pytest.mark.parametrize("form", ["json", "sarif", "markdown", "github"])
def test_forms(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output has the verdict in that form, and nothing else says anything; the exit code is the same."""
    folder = _run(tmp_path / "run", {0: _FINE, 1: _FINE}, [_FINDING])
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    files = ["--json", "v.json", "--markdown", "v.md"]
    assert main(["verdict", str(folder), "--format", form, *files]) == 1
    out, err = capfd.readouterr()
    assert err == ""
    assert not (tmp_path / "summary.md").exists()
    if form == "sarif":
        assert [result["ruleId"] for result in json.loads(out)["runs"][0]["results"]] == ["RANK101"]
    elif form == "github":
        assert all(line.startswith("::") for line in out.splitlines())
        assert "title=RANK101" in out
    else:
        assert out == (tmp_path / {"json": "v.json", "markdown": "v.md"}[form]).read_text(encoding="utf-8")


def test_a_form_that_nobody_gets_is_no_clean_verdict(tmp_path: Path) -> None:
    """Where standard output is full, the exit code says so, and Python ends as usual."""
    _run(tmp_path / "run", {0: _FINE, 1: _FINE}, statuses={"0": 0, "1": 0})
    words = [sys.executable, "-m", "ddpdebug", "verdict", "run", "--format", "json"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (4, "")
