"""A verdict as SARIF: valid, complete, at the user's line, with fingerprints that the next run has again."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ddpdebug.ci.sarif import to_sarif
from ddpdebug.ci.verdict import Outcome, Verdict, judge
from ddpdebug.detectors.pages import pages
from ddpdebug.schema.finding import Finding, Severity

_FILE = Path(__file__).parent.parent / "support" / "schemas" / "sarif_strict.json"
_SCHEMA = jsonschema.Draft202012Validator(json.loads(_FILE.read_text(encoding="utf-8")))
_EVIL = "w\x00]]>\x1b[31m\ud800 <script>&\u2028\n::error::x | `*_[a](b)"


def _finding(code: str = "RANK101", severity: Severity = Severity.CRITICAL, **more: Any) -> Finding:
    values: dict[str, Any] = {"title": "parameters differ", "step": 3, "ranks": (1,), "subject": ("w",), **more}
    return Finding(code=code, severity=severity, **values)


def _judged(*findings: Finding, **more: Any) -> Verdict:
    outcomes = {rank: Outcome(rank=rank, reason="finished", exit_code=0, steps={"0": 5}) for rank in range(2)}
    return judge(findings, more.pop("outcomes", outcomes), world=2, **more)


def _log(verdict: Verdict, root: str = "/repository") -> Any:
    log = json.loads(to_sarif(verdict, "train.py", root))
    _SCHEMA.validate(log)
    (run,) = log["runs"]
    return run


_MANY = [_finding("SYNC205", location="/repository/src/my train.py:58"), _finding("RCP805", Severity.WARNING)]


def test_a_result_for_each_finding() -> None:
    """With its rule, its level, the user's line from the repository's root, and the page of its code as help."""
    run = _log(_judged(*_MANY, _finding("HLTH712", Severity.INFO, location="lib.py:2")))
    rules = run["tool"]["driver"]["rules"]
    found = {result["ruleId"]: result for result in run["results"]}
    assert {code: result["level"] for code, result in found.items()} == {
        "SYNC205": "error",
        "RCP805": "warning",
        "HLTH712": "note",
    }
    assert all(rules[result["ruleIndex"]]["id"] == code for code, result in found.items())
    places = {code: result["locations"][0]["physicalLocation"] for code, result in found.items()}
    assert places["SYNC205"] == {
        "artifactLocation": {"uri": "src/my%20train.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 58},
    }
    assert places["RCP805"] == {"artifactLocation": {"uri": "train.py", "uriBaseId": "%SRCROOT%"}}
    assert places["HLTH712"]["region"] == {"startLine": 2}
    help_text = next(rule["help"]["text"] for rule in rules if rule["id"] == "SYNC205")
    assert all(" ".join(words.split()) in help_text for words in pages()["SYNC205"].prose["remedy"])


def test_a_file_outside_of_the_repository_is_named_in_full() -> None:
    """By a URI of its own."""
    (result,) = _log(_judged(_finding(location="/elsewhere/a b.py:1")))["results"]
    place = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == {"uri": "file:///elsewhere/a%20b.py"}


def test_fingerprints_are_those_of_the_next_run() -> None:
    """Of another step, other ranks, another run and another place of the checkout; another line is another finding."""

    def prints(finding: Finding, root: str = "/repository") -> list[str]:
        return [r["partialFingerprints"]["ddpdebug/v1"] for r in _log(_judged(finding), root)["results"]]

    first = _finding(location="/repository/train.py:8", run="a", id="1")
    again = replace(first, step=90, ranks=(0,), run="b", id="7", count=4, location="/tmp/build/train.py:8")
    assert prints(first) == prints(again, "/tmp/build")
    assert prints(first) != prints(replace(first, location="/repository/train.py:9"))
    assert prints(first) != prints(replace(first, code="RANK102"))


@pytest.mark.parametrize("verdict", [
    _judged(_finding(title=_EVIL, subject=(_EVIL, _EVIL), location=f"{_EVIL}:7", evidence={_EVIL: _EVIL})),
    _judged(_finding("X\ud800", location="a.py:0")),
    _judged(outcomes={1: Outcome(rank=1, reason=f"exception: {_EVIL}", exit_code=1)}, statuses={1: 1}),
    _judged(timed_out=True, outcomes={}, places={1: _EVIL}),
])  # fmt: skip
def test_whatever_the_job_says_it_is_valid(verdict: Verdict) -> None:
    """Names and messages of the job are data of a valid log, in ASCII."""
    _log(verdict)
    assert to_sarif(verdict, _EVIL).isascii()


def test_a_job_that_failed_is_no_clean_log() -> None:
    """How it ended stands beside the results, with the exit code."""
    failed = _judged(outcomes={0: Outcome(rank=0, reason="exception: ValueError: x", exit_code=1)}, statuses={0: 1})
    (invocation,) = _log(failed)["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, failed.exit_code)
    told = invocation["toolExecutionNotifications"]
    assert any(each["level"] == "error" and "ValueError: x" in each["message"]["text"] for each in told)
    (invocation,) = _log(_judged())["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (True, 0)


def test_the_schema_is_strict() -> None:
    """It refuses what the official one does."""
    log = json.loads(to_sarif(_judged(*_MANY), "train.py", "/repository"))
    assert _SCHEMA.is_valid(log)
    for change in (
        lambda run: run["results"][0].update(level="critical"),
        lambda run: run["results"][0].update(title="x"),
        lambda run: run["results"][0]["locations"][0]["physicalLocation"]["region"].update(startLine=0),
        lambda run: run["tool"]["driver"].pop("name"),
        lambda run: run["invocations"][0].pop("executionSuccessful"),
    ):
        wrong = copy.deepcopy(log)
        change(wrong["runs"][0])
        assert not _SCHEMA.is_valid(wrong)
