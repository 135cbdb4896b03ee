"""The end of a process by its own account: typed in the code, one sentence in files and for people.

The sentence is `RunEnded.reason`, and `reason` in `outcome.json`: "finished", "stopped" (after `--steps`),
"interrupted" (Ctrl-C), "exception: <class>: <text>" or "hang: <code> <title>". Standard library only.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

_CODE = re.compile(r"\b[A-Z]{2,4}\d{3,4}\b")
_CLASS = re.compile(r"(?:\w+\.)*(\w+)")


class Kind(StrEnum):
    """The kind of a process's end."""

    FINISHED = "finished"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    EXCEPTION = "exception"
    FINDING = "exception of a finding"  # `on_finding="raise"`
    HANG = "hang"
    UNKNOWN = ""


class Ended(NamedTuple):
    """The end of a process."""

    kind: Kind
    code: str = ""  # of the finding that has ended it
    error: str = ""  # the name of the exception's class
    text: str = ""  # the sentence without its kind

    @property
    def is_in_order(self) -> bool:
        """Whether the process ended as it should."""
        return self.kind in {Kind.FINISHED, Kind.STOPPED}


def parse_end(reason: str) -> Ended:
    """Parse the sentence about an end; `Kind.UNKNOWN` with the whole sentence if it has none of the known forms."""
    word, _, text = reason.partition(": ")
    if reason in {Kind.FINISHED, Kind.STOPPED, Kind.INTERRUPTED}:
        return Ended(Kind(reason), text=reason)
    if word == Kind.HANG:
        return Ended(Kind.HANG, code=_first(_CODE.match(text)), text=text)
    if word == Kind.EXCEPTION:
        name = _CLASS.match(text)
        error = name[1][:60] if name else ""
        if error == "FindingError":
            return Ended(Kind.FINDING, code=_first(_CODE.search(text)), error=error, text=text)
        return Ended(Kind.EXCEPTION, error=error, text=text)
    return Ended(Kind.UNKNOWN, text=reason)


def _first(found: re.Match[str] | None) -> str:
    return found[0] if found else ""
