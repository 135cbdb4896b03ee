"""Hangs that stand, with literals."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.hangs import ENDED, GRACE_SECONDS, SURE_GRACE_SECONDS, Standing, parties, stands


def _hang(code: str = "HANG501", severity: Severity = Severity.CRITICAL, **evidence: Any) -> Finding:
    return Finding(code=code, severity=severity, title="t", ranks=(1,), evidence={"hang": "0:1", **evidence}, id="a")


@pytest.mark.parametrize(
    "finding, expected",
    [
        (_hang(), True),
        (_hang(severity=Severity.WARNING), False),
        (_hang(**{ENDED: 8.0}), False),
        (_hang("RANK101"), False),
    ],
    ids=["critical", "at work", "over", "no hang"],
)
def test_what_stands(finding: Finding, expected: bool) -> None:
    """A hang that is critical and not over."""
    assert stands(finding) is expected


@pytest.mark.parametrize(
    "finding, seconds",
    [
        (_hang(), GRACE_SECONDS),
        (_hang("HANG502", difference="operation"), SURE_GRACE_SECONDS),
        (_hang("HANG502", difference="unknown"), GRACE_SECONDS),
        (_hang("HANG503"), SURE_GRACE_SECONDS),
    ],
    ids=["stuck", "other calls", "the same call", "gone"],
)
def test_grace(finding: Finding, seconds: float) -> None:
    """What may end by itself has the time to do so; what cannot is left for the exceptions that are on the way."""
    standing = Standing()
    assert standing.due([finding], 100.0) is None
    assert standing.due([finding], 100.0 + seconds - 0.1) is None
    assert standing.due([finding], 100.0 + seconds) is finding


def test_a_hang_that_is_over_begins_anew() -> None:
    """The time of grace of the next one is its own."""
    standing = Standing()
    standing.due([_hang()], 0.0)
    assert standing.due([_hang(**{ENDED: 8.0})], 9.0) is None
    assert standing.due([_hang()], 12.0) is None


def test_parties_of_a_finding_from_anywhere() -> None:
    """Ranks are those of the run, and texts are cut, whatever the file says."""
    hostile = {"0-2,7": "all_reduce #6", "x": "y", "-3": "z", "1-999999999999": "b" * 10_000, "٣": "digits"}
    known = parties(_hang(waiting=hostile, missing={"3": {"no": "text"}}), 4)
    assert sorted(known.waiting) == [0, 1, 2, 3]
    assert known.waiting[0] == "all_reduce #6"
    assert max(map(len, known.waiting.values())) <= 600
    assert known.missing == {3: "{'no': 'text'}"}
    assert parties(_hang(waiting=[1], missing="x"), 4).waiting == {}
