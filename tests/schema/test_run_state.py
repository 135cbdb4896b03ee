"""The ends of processes: state, outcome and cause."""

from __future__ import annotations

import signal

import pytest

from ddpdebug.schema.run_state import OUTCOMES, End, RunState, end_of, end_without_a_word

_FINDING = "exception: FindingError: NUM305 (critical) at step 3: the input is not finite"


@pytest.mark.parametrize(
    ("reason", "code", "gravest", "end"),
    [
        ("finished", 0, "", End(RunState.FINISHED, "clean")),
        ("stopped", 0, "", End(RunState.FINISHED, "clean")),
        ("finished", 0, "RANK101", End(RunState.FINISHED, "findings", "RANK101")),
        ("finished", None, "", End(RunState.FINISHED, "clean")),
        ("finished", 3, "", End(RunState.FAILED, "failed")),
        (_FINDING, 1, "RANK101", End(RunState.FAILED, "findings", "NUM305")),
        ("exception: FindingError: ?", 1, "RANK101", End(RunState.FAILED, "findings", "RANK101")),
        ("exception: RuntimeError: x", 1, "RANK101", End(RunState.FAILED, "failed", "RuntimeError")),
        ("exception: torch.OutOfMemoryError: x", 1, "", End(RunState.FAILED, "failed", "OutOfMemoryError")),
        ("exception: SystemExit: 3", 3, "", End(RunState.FAILED, "failed", "SystemExit")),
        ("exception: SystemExit: 143", 143, "", End(RunState.CANCELLED, "cancelled", "SIGTERM")),
        ("exception: SystemExit: 137", 137, "", End(RunState.FAILED, "failed", "SystemExit")),
        ("interrupted", 130, "RANK101", End(RunState.CANCELLED, "cancelled", "SIGINT")),
        ("hang: HANG503 a rank left", 4, "", End(RunState.FAILED, "failed", "HANG503")),
    ],
)
def test_an_end_that_was_told(reason: str, code: int | None, gravest: str, end: End) -> None:
    """By the reason that the run directory has."""
    assert end_of(reason, code, gravest=gravest) == end
    assert end.outcome in OUTCOMES


@pytest.mark.parametrize(
    ("status", "asked", "end"),
    [
        (signal.SIGTERM, False, End(RunState.CANCELLED, "cancelled", "SIGTERM")),
        (signal.SIGKILL, False, End(RunState.LOST, "lost", "SIGKILL")),
        (signal.SIGKILL, True, End(RunState.CANCELLED, "cancelled", "SIGKILL")),
        (signal.SIGSEGV | 0x80, False, End(RunState.LOST, "lost", "SIGSEGV")),  # with a core dump
        (None, False, End(RunState.LOST, "lost")),
        (None, True, End(RunState.CANCELLED, "cancelled")),
        (0, False, End(RunState.FINISHED, "clean")),
        (7 << 8, False, End(RunState.FAILED, "failed")),
        (143 << 8, False, End(RunState.CANCELLED, "cancelled", "SIGTERM")),
    ],
)
def test_an_end_without_a_word(status: int | None, asked: bool, end: End) -> None:
    """By what the kernel knows, and by what those beside it were told."""
    assert end_without_a_word(status, asked=asked) == end
    assert end.outcome in OUTCOMES


def test_the_largest_of_the_ranks_is_the_state_of_the_run() -> None:
    """Dashboards and alerts have these numbers."""
    assert [state.label for state in sorted(RunState)] == ["finished", "running", "ill", "cancelled", "failed", "lost"]
    assert [*RunState] == [0, 1, 2, 3, 4, 5]
