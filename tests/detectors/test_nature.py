"""Whether a restart helps, by what a finding is caused by."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddpdebug.ci.json_junit import to_json
from ddpdebug.ci.verdict import judge
from ddpdebug.commands import main
from ddpdebug.detectors.catalog import FAMILIES
from ddpdebug.detectors.nature import _CODES, _FAMILIES, Nature, nature, restart, usual
from ddpdebug.detectors.pages import pages
from ddpdebug.schema.finding import Finding, Severity


def _finding(code: str, **evidence: Any) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, title="x", evidence=evidence)


def test_every_code_has_one() -> None:
    """Each family has a default, and what is otherwise exists and is otherwise."""
    assert set(_FAMILIES) == set(FAMILIES)
    assert all(usual(code) is not None for code in pages())
    assert _CODES.keys() <= pages().keys()
    assert [code for code, found in _CODES.items() if found is _FAMILIES[code.rstrip("0123456789")]] == []
    assert usual("XYZ1") is None
    assert restart(_finding("XYZ1")) is None


@pytest.mark.parametrize(
    "finding, expected",
    [
        (_finding("RCP808"), Nature.DETERMINISTIC),
        (_finding("DATA903"), Nature.DATA),
        (_finding("RANK101", values={"0": 0.5, "1": 0.5000001}), Nature.DETERMINISTIC),
        (_finding("RANK101", values={"0": 0.125, "1": 0.125, "2": 2.0**125}), Nature.HARDWARE),  # bit 30, of four off
        (_finding("RANK101", values={"0": 1.0, "1": -1.0}), Nature.HARDWARE),
        (_finding("RANK101", values={"0": 0.1, "1": 0.4}), Nature.DETERMINISTIC),
        (_finding("RANK101", values={"0": 1.0, "1": "nan"}), Nature.DETERMINISTIC),
        (_finding("RANK101", values=[1.0, -1.0]), Nature.DETERMINISTIC),
        (_finding("HANG501"), Nature.TRANSIENT),
        (_finding("HANG503", missing={"1": "it was killed by SIGKILL"}), Nature.ENVIRONMENT),
        (_finding("HANG503", missing={"1": "it has gone: killed by SIGSEGV"}), Nature.TRANSIENT),
        (_finding("HANG503", missing={"1": "it has ended: exception: ValueError: x"}), Nature.DETERMINISTIC),
        (_finding("FAIL1024", left="without a word: killed, past the exit handlers"), Nature.ENVIRONMENT),
        (_finding("FAIL1024", left={"1": "KeyError: 3"}), Nature.DETERMINISTIC),
        (_finding("FAIL1020"), Nature.ENVIRONMENT),
        (_finding("FAIL1005"), Nature.DETERMINISTIC),
    ],
)
def test_by_code_and_evidence(finding: Finding, expected: Nature) -> None:
    """The code says what is usual, and the evidence what it is this time."""
    assert nature(finding) is expected


def test_the_verdict_says_it_and_exits_as_before() -> None:
    """Beside each finding; what is cured by a restart fails a check all the same."""
    verdict = judge([_finding("HANG503", missing={"1": "killed by SIGKILL"}), _finding("FAIL1020")], {}, world=1)
    record = json.loads(to_json(verdict, None))
    assert {finding["restart"]["cause"] for finding in record["findings"]} == {"environment"}
    assert record["findings"][0]["restart"]["helps"] == Nature.ENVIRONMENT.advice
    assert verdict.exit_code == 4


def test_explain_says_what_is_usual(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line."""
    assert main(["explain", "RCP808"]) == 0
    assert f"mostly deterministic: {Nature.DETERMINISTIC.advice}" in capsys.readouterr().out
