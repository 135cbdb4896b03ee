"""The errors of ddpdebug. Torch-free.

DdpdebugError
├── UsageError (also a ValueError)        a wrong option or value; commands exit with 2
│   └── TargetError                       there is no such script or module to run
├── FindingError (also a RuntimeError)    a finding ends the run: `on_finding="raise"`, `guard="stop"`
└── DeviceFailedError (also a RuntimeError)  a device has failed before, and must not be asked any more
StopRun (a BaseException)                 ends a script after `--steps N`; not an error
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdebug.schema.finding import Finding


_MAX_ESSENCE = 300
#: What tells people nothing in the texts of torch: where in its sources, and advice that fits every case.
_NOISE = re.compile(
    r"\[(enforce fail at )?[\w./-]+\.(cc|cpp|h|cu):\d+\] ?|This is typically caused by a remote worker.*", re.DOTALL
)
#: Classes whose text no code in Python makes.
_PLAIN: set[type[object]] = {bool, bytes, float, int, str, type(None)}
_OF_WORKER = "Original Traceback (most recent call last):"


#: Why a part is off that would judge by another's half of the data.
NEEDS = "it needs {}, which is off"


class DdpdebugError(Exception):
    """The base class of all errors that ddpdebug raises on purpose."""


class UsageError(DdpdebugError, ValueError):
    """A wrong option, value or file; nothing has been started."""

    exit_code = 2


class TargetError(UsageError):
    """There is no such script or module; `run` exits with the status that Python has then."""

    def __init__(self, message: str, status: int = UsageError.exit_code) -> None:
        super().__init__(message)
        self.status = status


class FindingError(DdpdebugError, RuntimeError):
    """A finding ends the run at the same step on every rank (`on_finding="raise"`, `guard="stop"`)."""

    def __init__(self, finding: Finding, note: str | None = None) -> None:
        self.finding = finding
        step = "" if finding.step is None else f" at step {finding.step}"
        ranks = f", ranks {', '.join(map(str, finding.ranks))}" if finding.ranks else ""
        subject = f": {finding.subject[0]}" if finding.subject else ""
        more = f" ({note})" if note else ""
        super().__init__(f"{finding.code} {finding.title}{step}{ranks}{subject}{more}")


class DeviceFailedError(DdpdebugError, RuntimeError):
    """A device has failed before, by the error that this one quotes; nothing is read from it any more."""


class StopRun(BaseException):  # `except Exception` of a script must not catch it
    """The script has taken the steps that `--steps` allows; its `finally` blocks run, nothing is printed."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        super().__init__(f"stopped after {steps} optimizer steps")


def text_of(error: BaseException) -> str:
    """Return class and text of an error; the class alone if Python code would make the text.

    It may be the script's: it may raise, print or count, and the interpreter calls it once, for the traceback.
    """
    kind = type(error)
    is_plain = isinstance(error, DdpdebugError) or type(kind.__str__) is type(BaseException.__str__)
    if is_plain and len(error.args) == 1 and issubclass(cls := type(error.args[0]), str) and cls is not str:
        return f"{kind.__name__}: {str.__str__(error.args[0])}"  # as of an error in a worker of a DataLoader
    return f"{kind.__name__}: {error}" if is_plain and not {*map(type, error.args)} - _PLAIN else kind.__name__


def essence(text: str) -> str:
    """Return the informative part of an error's text: its first part, and a failed worker's own error."""
    head, of_worker, trace = text.partition(_OF_WORKER)
    own = next((line.strip() for line in reversed(trace.splitlines()) if line.strip()), "") if of_worker else ""
    told = f"{_NOISE.sub('', head).strip()} {own}".strip()
    return told if len(told) <= _MAX_ESSENCE else f"{told[: _MAX_ESSENCE - 1]}…"


def did_you_mean(name: str, valid: Iterable[str], *, prefix: str = "", listed: str = "") -> str:
    """Return the end of an error message about an unknown name: a near match, or the valid names if there is none.

    Args:
        prefix: stands before each name.
        listed: where all names are listed, a clause; then only the nearest few are named.
    """
    names = list(valid)
    near = get_close_matches(name, names, *((4, 0.5) if listed and not prefix else (1,)))
    if near:
        return f"did you mean {', '.join(prefix + each for each in near)}?"
    return listed or f"valid are {', '.join(prefix + each for each in names)}"
