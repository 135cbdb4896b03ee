"""The sentence of an end, taken apart in one place."""

from __future__ import annotations

import pytest

from ddpdebug.schema.ended import Ended, Kind, parse_end
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.hangs import reason_of


@pytest.mark.parametrize(
    ("reason", "end", "in_order"),
    [
        ("finished", Ended(Kind.FINISHED, text="finished"), True),
        ("stopped", Ended(Kind.STOPPED, text="stopped"), True),
        ("interrupted", Ended(Kind.INTERRUPTED, text="interrupted"), False),
        ("exception: ValueError: x: y", Ended(Kind.EXCEPTION, error="ValueError", text="ValueError: x: y"), False),
        ("exception: a.b.Own: x", Ended(Kind.EXCEPTION, error="Own", text="a.b.Own: x"), False),
        ("exception: SystemExit: 3", Ended(Kind.EXCEPTION, error="SystemExit", text="SystemExit: 3"), False),
        (
            "exception: FindingError: FAIL1001 title, step 3",
            Ended(Kind.FINDING, "FAIL1001", "FindingError", "FindingError: FAIL1001 title, step 3"),
            False,
        ),
        ("finished early", Ended(Kind.UNKNOWN, text="finished early"), False),
        ("", Ended(Kind.UNKNOWN), False),
    ],
)
def test_a_sentence_says_kind_code_and_error(reason: str, end: Ended, in_order: bool) -> None:
    """And a sentence of another form is none of them."""
    assert parse_end(reason) == end
    assert end.is_in_order is in_order


def test_what_a_rank_says_that_leaves_a_hang_has_the_findings_code() -> None:
    """The sentence is made and read by the same words."""
    finding = Finding(code="HANG501", severity=Severity.CRITICAL, title="a rank is stuck")
    assert parse_end(reason_of(finding)) == Ended(Kind.HANG, "HANG501", text="HANG501 a rank is stuck")
