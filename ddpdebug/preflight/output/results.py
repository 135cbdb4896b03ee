"""Results of the preflight's checks: status, measured values, plots, tables; and the groups. Pure.

Everything in it is a JSON value (numbers, texts, lists, dictionaries), so that it is printed, saved and drawn alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from typing import Any

from ddpdebug.errors import UsageError, did_you_mean

#: The groups in their order, and the module with the function `check` of each.
GROUPS = {
    "data": "data",
    "parameters": "parameters",
    "initial loss": "initial_loss",
    "initialisation": "initialisation",
    "gradient flow": "gradient_flow",
    "overfit": "overfit",
    "learning rate": "lr_finder",
    "determinism": "determinism",
}


class Status(StrEnum):
    """The outcome of a check."""

    PASS = "pass"  # noqa: S105 - not a password
    WARN = "warn"  # looks wrong, a person should look
    FAIL = "fail"  # wrong
    INFO = "info"  # worth knowing, never fails
    SKIPPED = "skipped"  # could not be done; the summary says why


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one line of a plot."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines over a common axis.

    Args:
        title: what is shown.
        x_label: what the axis means, with its unit.
        y_label: likewise.
        series: the lines.
        log_x: whether the axis is logarithmic; values that are not positive are left out there.
        log_y: likewise.
        marks: places on the x axis with a text.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells under a head; cells are texts or numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Check:
    """One question that the preflight asked, and its answer.

    Args:
        status: the answer.
        summary: one sentence with what was measured and against what.
        group: the step of the preflight, one of `GROUPS`; given by what runs its checks (`examine`).
        name: what was asked, in a few words; unique within the group. That of the part which asks unless given.
        code: the finding's code in the catalogue when the status is warn or fail and one fits (`RCP801`), else "".
        evidence: the numbers.
        hypotheses: what may be behind it, the likeliest first.
        actions: what to do next.

    A check that has passed has no code, hypotheses or actions, whatever it is given.
    """

    status: Status
    summary: str
    _: KW_ONLY
    group: str = ""
    name: str = ""
    code: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    hypotheses: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()

    def __post_init__(self) -> None:
        """Drop what belongs to a check that has not passed, so that it can be given in any case."""
        if self.status is Status.PASS:
            for name, nothing in (("code", ""), ("hypotheses", ()), ("actions", ())):
                object.__setattr__(self, name, nothing)


def named(name: str, checks: Iterable[Check]) -> list[Check]:
    """Return checks; those without a name get this one."""
    return [check if check.name else replace(check, name=name) for check in checks]


def chosen(names: str) -> list[str]:
    """Parse a comma-separated list of groups; raise UsageError for an unknown one."""
    wanted = [name.strip().replace("-", " ").replace("_", " ") for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in GROUPS:
            raise UsageError(f"unknown group {name!r}; {did_you_mean(name, GROUPS)}")
    return wanted
