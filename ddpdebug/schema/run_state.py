"""The state, the waits and the outcome of a run's process, as metrics show them. Standard library only.

The codes are fixed: dashboards and alerts map them to words. They are ordered so that the largest of a run's ranks is
that of the run: a run is lost that has lost one rank, whatever the others came to.
"""

from __future__ import annotations

import re
import signal
from enum import IntEnum
from typing import NamedTuple

from ddpdebug.schema.ended import Kind, parse_end

#: What a run may have come to: the words of a check's verdict as far as a single rank can know, and `cancelled`.
OUTCOMES = ("clean", "findings", "failed", "cancelled", "lost")
#: By these somebody asks a process to end; nobody does by any other.
_ASKED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


#: What a run is called where there are many: when it began, and its id. Run directories are named so as well.
RUN_KEY = re.compile(r"\d{8}T\d{6}Z-[A-Za-z0-9_.-]{1,40}", re.ASCII)


def run_key(time: object, run_id: object) -> str:
    """Return the key of a run among many; empty if time or id are malformed."""
    begun = re.match(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)", str(time))
    key = "{}{}{}T{}{}{}Z".format(*begun.groups()) + f"-{run_id}" if begun else ""
    return key if RUN_KEY.fullmatch(key) else ""


class RunState(IntEnum):
    """The state of one process, by its code."""

    FINISHED = 0
    RUNNING = 1
    ILL = 2
    CANCELLED = 3
    FAILED = 4
    LOST = 5

    @property
    def label(self) -> str:
        """The state in words."""
        return self.name.lower()


class WaitState(IntEnum):
    """The verdict on waiting ranks, by its code: the larger, the less likely the wait ends by itself."""

    NONE = 0  # nobody waits, or not for long
    AT_WORK = 1  # the rank that is waited for is at work
    OVERDUE = 2  # the same, for far longer than ever before in the run
    STUCK = 3  # nothing moves in it
    SILENT = 4  # its interpreter gives no sign of life
    APART = 5  # the ranks wait in different calls, or in a circle
    LEFT = 6  # it has left

    @property
    def label(self) -> str:
        """The verdict in words."""
        return self.name.lower().replace("_", " ")

    @property
    def is_hang(self) -> bool:
        """Whether the wait is not expected to end by itself."""
        return self >= WaitState.STUCK


class End(NamedTuple):
    """How a process has ended."""

    state: RunState
    outcome: str  # one of OUTCOMES
    cause: str = ""  # a finding's code, an exception's type or a signal's name; empty where there is none


def end_of(reason: str, exit_code: int | None, *, gravest: str = "") -> End:  # noqa: PLR0911 - a line for each end
    """Return the end of a process from its own report.

    Args:
        reason: of `RunEnded`.
        gravest: the code of the gravest finding at error or above, empty where there is none.
    """
    known = parse_end(reason)
    if known.kind is Kind.INTERRUPTED:
        return End(RunState.CANCELLED, "cancelled", "SIGINT")
    if known.kind is Kind.FINDING:
        return End(RunState.FAILED, "findings", known.code or gravest)
    if known.kind is Kind.HANG:
        return End(RunState.FAILED, "failed", known.code)
    if known.error == "SystemExit" and (number := _signal(exit_code)) in _ASKED:
        return End(RunState.CANCELLED, "cancelled", _name(number))  # a handler of the script's own
    if known.kind is Kind.EXCEPTION:
        return End(RunState.FAILED, "failed", known.error)
    if exit_code:
        return End(RunState.FAILED, "failed")
    return End(RunState.FINISHED, "findings" if gravest else "clean", gravest)


def end_without_a_word(status: int | None, *, asked: bool = False, gravest: str = "") -> End:
    """Return the end of a process without a report: it was killed, or exited without its exit handlers.

    Args:
        status: as `waitpid` has it; None where nobody could learn it.
        asked: those beside it were asked to end by a signal.
    """
    number = None if status is None else status & 0x7F
    if number in _ASKED:
        return End(RunState.CANCELLED, "cancelled", _name(number))
    if number == 0 and status is not None:
        if _signal(status >> 8) in _ASKED:
            return End(RunState.CANCELLED, "cancelled", _name(_signal(status >> 8)))
        return end_of("finished", status >> 8, gravest=gravest)
    if asked:  # whoever asks kills a while later
        return End(RunState.CANCELLED, "cancelled", _name(number))
    return End(RunState.LOST, "lost", _name(number))


def _signal(exit_code: int | None) -> int | None:
    return exit_code - 128 if exit_code is not None and exit_code > 128 else None


def _name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return ""
