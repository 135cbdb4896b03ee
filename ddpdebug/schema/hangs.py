"""Persistent hangs: those that end a job are critical and last beyond a time of grace. Torch-free, no clock.

The verdict alone ends nothing. A process that was stopped is continued, a lock is given back, a debugger is left: such
a hang is closed with its duration, and the job goes on. So who is asked to end a job (`--on-hang stop`, `check`) waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddpdebug.schema.ended import Kind, parse_end
from ddpdebug.schema.finding import Finding, Severity

#: How long a hang that may end by itself has to do so. It is named 5 to 12 s after it began, so that a stop of 8 s, and
#: one of 15 s, end nothing, also where the ranks need some seconds to be heard again on a machine that is busy.
GRACE_SECONDS = 10.0
#: The same where it cannot: other collectives, a circle, a rank that has gone. The ranks that are left may have an
#: exception on the way, which says more, and handlers of their own.
SURE_GRACE_SECONDS = 3.0
#: Evidence of a hang that is over: after how long.
ENDED = "ended_after_seconds"
_MOST, _MAX_TEXT = 256, 600


def is_hang(finding: Finding) -> bool:
    """Whether a finding is about ranks that wait for others (`HANG...`)."""
    return finding.code.startswith("HANG")


def is_over(finding: Finding) -> bool:
    """Whether a finding is a hang that has ended by itself."""
    return is_hang(finding) and ENDED in finding.evidence


def stands(finding: Finding) -> bool:
    """Whether a finding is a hang that goes on, as far as known, and keeps the job from its end.

    A rank that is at work for very long is a warning, and never one.
    """
    return is_hang(finding) and finding.severity is Severity.CRITICAL and not is_over(finding)


def grace(finding: Finding) -> float:
    """Return the seconds of grace of a hang, before a job may be ended for it."""
    may_end = finding.code == "HANG501" or finding.evidence.get("difference") == "unknown"
    return GRACE_SECONDS if may_end else SURE_GRACE_SECONDS


def reason_of(finding: Finding) -> str:
    """Return the reason, as `RunEnded` has it, of a rank that exits because of a hang."""
    return f"{Kind.HANG}: {finding.code} {finding.title}"


def is_by_hang(reason: str) -> bool:
    """Whether a rank exited because of a hang, by the reason of its end."""
    return parse_end(reason).kind is Kind.HANG


class Standing:
    """The time since when each hang has persisted, by the caller's clock."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def due(self, findings: Iterable[Finding], now: float) -> Finding | None:
        """Return the first hang that has outlasted its time of grace; None if there is none."""
        found = {name_of(finding): finding for finding in findings if stands(finding)}
        self._since = {name: self._since.get(name, now) for name in found}
        late = (name for name, finding in found.items() if now - self._since[name] >= grace(finding))
        return next((found[name] for name in late), None)


@dataclass(frozen=True, slots=True)
class Parties:
    """The waiting and the missing ranks of a hang, in words, from an untrusted finding.

    Args:
        waiting: rank -> the call that it waits in.
        missing: rank -> what one that is waited for does; what each does where nobody can move.
    """

    waiting: Mapping[int, str]
    missing: Mapping[int, str]


def parties(finding: Finding, world: int) -> Parties:
    """Return the waiting and the missing ranks of a hang."""
    return Parties(
        waiting=_by_rank(finding.evidence.get("waiting"), world),
        missing=_by_rank(finding.evidence.get("missing", finding.evidence.get("where")), world),
    )


def _by_rank(value: object, world: int) -> dict[int, str]:
    """Return texts by rank, of texts by ranks as "0-2,7"; what is no such text is left out."""
    found: dict[int, str] = {}
    for key, text in list(value.items())[:_MOST] if isinstance(value, Mapping) else ():
        for span in str(key)[:_MAX_TEXT].split(","):
            first, dash, last = span.partition("-")
            if first.isascii() and first.isdecimal() and (not dash or (last.isascii() and last.isdecimal())):
                low, high = int(first[:9]), int((last if dash else first)[:9])
                found |= dict.fromkeys(range(low, min(high + 1, world)), str(text)[:_MAX_TEXT])
    return dict(sorted(found.items()))


def name_of(finding: Finding) -> str:
    """Return the identity of a hang on all ranks: its judge and the judge's number for it."""
    return str(finding.evidence.get("hang") or finding.id or finding.code)[:80]
