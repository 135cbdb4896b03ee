"""The results of a preflight as terminal lines: an overview, then details of all checks that did not pass. Pure.

The lines carry names of styles; `render` drops them, `styled` turns them into colours.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any

from ddpdebug.preflight.output.results import Check, Status, Table
from ddpdebug.preflight.output.terminal_plot import Line, draw
from ddpdebug.sinks.text import evidence_lines
from ddpdebug.sinks.words import clean, counted, number

WORDS = {
    Status.FAIL: "failed",
    Status.WARN: "to look at",
    Status.PASS: "passed",
    Status.INFO: "for information",
    Status.SKIPPED: "skipped",
}
#: Groups whose picture is what people ask for, even when all is well.
_DRAWN = ("overfit", "learning rate")
_GRAVE = (Status.FAIL, Status.WARN)
_MIN_WIDTH = 60
_NAME_WIDTH = 30
_LABEL_WIDTH = 12
_PLOT_WIDTH = 90
_MAX_ROWS = 8
_MAX_CELL = 40
_LIMIT = 2000
#: The colours of lines differ in brightness too.
_STYLES = {
    "pass": "green",
    "warn": "bold black on yellow",
    "fail": "bold white on red",
    "info": "cyan",
    "skipped": "dim",
    "command": "bold green",
    "series 0": "blue",
    "series 1": "yellow",
    "series 2": "green",
    "series 3": "magenta",
    "series 4": "red",
    "series 5": "cyan",
}


def render(checks: Sequence[Check], width: int = 100) -> str:
    """Return the overview and the details as plain text of at most `width` columns."""
    return "".join(f"{''.join(text for text, _ in line).rstrip()}\n" for line in report(checks, width))


def report(checks: Sequence[Check], width: int, *, color: bool = False) -> list[Line]:
    """Return overview and details as lines with styles."""
    width = max(_MIN_WIDTH, width)
    lines = [*summary(checks, width), []]
    room = min(_NAME_WIDTH, max((len(clean(check.name, 60)) for check in checks), default=0))
    for group, members in groupby(checks, lambda check: check.group):
        lines.append([(clean(group, 60), "bold")])
        for check in members:
            lines += _row(check, room, width)
    for check in sorted(checks, key=lambda check: list(WORDS).index(check.status)):
        if needs_a_look(check) or (check.group in _DRAWN and check.plots):
            lines += [[], *_details(check, width, color=color)]
    return lines


def needs_a_look(check: Check) -> bool:
    """Whether the details of a check are shown: it failed, warns, or has a code."""
    return check.status in _GRAVE or bool(check.code)


def summary(checks: Sequence[Check], width: int) -> list[Line]:
    """Return the checks counted by status ("12 passed, 1 warning"), on one line if it fits."""
    counts = Counter(check.status for check in checks)
    lines: list[Line] = [[(f"preflight: {counted(len(checks), 'check')}", "bold")]]
    for status, word in WORDS.items():
        if counts[status]:
            text = f"{counts[status]} {word}"
            if sum(len(piece) for piece, _ in lines[-1]) + 2 + len(text) > width:
                lines.append([])
            lines[-1] += [("  ", ""), (text, status.value if status in _GRAVE else "")]
    return lines


def _row(check: Check, room: int, width: int) -> Iterator[Line]:
    name = clean(check.name, 60)
    indent = room + 13
    pieces = wrap(clean(check.summary, _LIMIT), max(20, width - indent)) or [""]
    head: Line = [("  ", ""), (f"{check.status.value:<7}", check.status.value), (f"  {name:<{room}}  ", "")]
    if len(name) > room:
        yield head
        head = [(" " * indent, "")]
    yield [*head, (pieces[0], "")]
    for piece in pieces[1:]:
        yield [(" " * indent + piece, "")]


def _details(check: Check, width: int, *, color: bool) -> Iterator[Line]:
    head = " ".join(part for part in (clean(check.code, 20), f"{check.group}: {check.name}") if part)
    yield [(f" {check.status.value} ", check.status.value), (f" {clean(head, 200)}", "bold")]
    if needs_a_look(check):
        for label, texts in _parts(check):
            yield from _labelled(label, texts, width)
        for table in check.tables:
            yield from _table(table, width)
    for plot in check.plots[:1]:
        for line in draw(plot, min(width, _PLOT_WIDTH) - 2, color=color):
            yield [("  ", ""), *line]


def _parts(check: Check) -> Iterator[tuple[str, list[str]]]:
    causes = [clean(cause, _LIMIT) for cause in check.hypotheses]
    yield "measured", [clean(check.summary, _LIMIT)]
    yield "evidence", evidence_lines(check.evidence)
    yield "perhaps", [f"{i}. {cause}" for i, cause in enumerate(causes, 1)] if len(causes) > 1 else causes
    yield "next", [clean(action, _LIMIT) for action in check.actions]
    yield "more", [f"ddpdebug explain {clean(check.code, 20)}"] if check.code else []


def _labelled(label: str, texts: Sequence[str], width: int) -> Iterator[Line]:
    style = "command" if label == "more" else ""
    for i, text in enumerate(texts):
        hang = "   " if label == "perhaps" and len(texts) > 1 else ""
        for j, piece in enumerate(wrap(text, max(20, width - _LABEL_WIDTH), subsequent_indent=hang) or [""]):
            margin = f"  {label if i == j == 0 else ''}".ljust(_LABEL_WIDTH)
            yield [(margin, "dim"), (piece, style)]


def cell(value: Any) -> str:
    """Return a table cell as text: numbers short, everything else on one line."""
    if isinstance(value, int | float):
        return number(value)
    return "" if value is None else clean(value, 200)


def _table(table: Table, width: int) -> Iterator[Line]:
    """Yield the first rows; the last column gets what room is left, what does not fit ends with an ellipsis."""
    rows = [[clean(name, _MAX_CELL) for name in table.head]]
    rows += [[clean(cell(value), _MAX_CELL) for value in row] for row in table.rows[:_MAX_ROWS]]
    columns = max(map(len, rows), default=0)
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(columns)]
    for i, row in enumerate(rows):
        text = "  ".join(f"{value:<{widths[j]}}" for j, value in enumerate(row)).rstrip()
        room = width - _LABEL_WIDTH
        yield [
            (" " * _LABEL_WIDTH, ""),
            (text if len(text) <= room else f"{text[: room - 1]}…", "dim" if i == 0 else ""),
        ]
    more = len(table.rows) - _MAX_ROWS
    if more > 0:
        yield [(f"{'':{_LABEL_WIDTH}}and {more} more rows", "dim")]


def styled(checks: Sequence[Check], width: int = 100) -> str:
    """Return overview and details with escape codes. Texts are never read as rich's markup."""
    from rich.console import Console  # noqa: PLC0415 - loaded when a terminal asks for it
    from rich.text import Text  # noqa: PLC0415

    target = io.StringIO()
    console = Console(
        file=target,
        width=width,
        force_terminal=True,
        color_system="standard",
        legacy_windows=False,
        highlight=False,
        emoji=False,
    )
    for line in report(checks, width, color=True):
        pieces = [(text, _STYLES.get(style, style)) for text, style in line]
        console.print(Text.assemble(*pieces), soft_wrap=True)
    return target.getvalue()
