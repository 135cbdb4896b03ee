"""The state of a run as the hub shows it: from the run's files, and from the time since the last sign of life.

Pure. The only place that decides which of `STATES` a run is in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.hangs import is_hang, is_over, stands
from ddpdebug.schema.run_state import End, RunState, WaitState, end_of

STATES = ("running", "ill", "hung", "lost", "failed", "finished", "cancelled")
#: States of runs that go on; a lost one may be heard of again.
LIVE = ("running", "ill", "hung")
#: A run has ended without a word when it was not heard of for so many seconds. Who pushes says something every few
#: seconds; of files, one is written once a minute at least, and a shared file system tells of it later still.
PATIENCE = {"push": 30.0, "watch": 180.0, "import": 180.0}
_HANGS = frozenset(state.label for state in WaitState if state.is_hang)


class Told(NamedTuple):
    """The files of a run that show how it ended: `run.json`, the outcomes of its ranks, and `check.json`."""

    run: Mapping[str, Any]
    outcomes: Mapping[int, Mapping[str, Any]] = {}
    check: Mapping[str, Any] | None = None


class State(NamedTuple):
    """The state, outcome and severity that the hub shows of a run."""

    state: str  # one of STATES
    outcome: str | None = None
    exit_code: int | None = None
    severity: str | None = None  # the worst of the open findings


def state_of(told: Told, findings: Sequence[Finding], silent: float, patience: float) -> State:
    """Return the state of a run.

    Args:
        silent: seconds since it was last heard of.
    """
    standing = [finding for finding in findings if not is_over(finding)]
    worst = max((finding.severity for finding in standing), default=None)
    severity = None if worst is None else worst.label
    gravest = max((f for f in standing if f.severity >= Severity.ERROR), key=lambda f: f.severity, default=None)
    code = "" if gravest is None else gravest.code
    own = _end(told.run.get("outcome"), code)
    ends = [end for outcome in told.outcomes.values() if (end := _end(outcome, code)) is not None]
    ends += [] if own is None else [own]
    ends += _by_launcher(told.check, code)
    exit_code = _number((told.run.get("outcome") or {}).get("exit_code")) if own is not None else None
    over = own is not None or told.check is not None
    if over or silent > patience:
        worst_end = max(ends, key=lambda end: end.state, default=None)
        if worst_end is None or (not over and worst_end.state is RunState.FINISHED):  # rank 0 has not finished
            return State("lost", "lost", None, severity)
        return State(worst_end.state.label, worst_end.outcome, exit_code, severity)
    waiting = told.run.get("waiting")
    waits = isinstance(waiting, Mapping) and waiting.get("state") in _HANGS
    if waits or any(is_hang(finding) and stands(finding) for finding in standing):
        return State("hung", severity=severity)
    return State("running" if gravest is None else "ill", severity=severity)


def _end(outcome: object, code: str) -> End | None:
    if not isinstance(outcome, Mapping) or not isinstance(reason := outcome.get("reason"), str):
        return None
    return end_of(reason, _number(outcome.get("exit_code")), gravest=code)


def _by_launcher(check: Mapping[str, Any] | None, code: str) -> list[End]:
    """Return what the process that has started the ranks saw of them."""
    if check is None:
        return []
    statuses = check.get("statuses")
    values = [_number(status) for status in statuses.values()] if isinstance(statuses, Mapping) else []
    if check.get("timed_out") is True:
        return [End(RunState.FAILED, "failed", "timeout")]
    failed = next((value for value in values if value), None)  # torchrun ends the others by signals
    return [] if failed is None else [end_of("finished", 1, gravest=code)]


def _number(value: object) -> int | None:
    known = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31
    return int(str(value)) if known else None
