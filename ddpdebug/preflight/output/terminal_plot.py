"""Draws a plot with characters. Pure.

One line is drawn with braille dots, two by four to a character; several are told apart by their mark, or by colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from ddpdebug.preflight.output.axes import Axis, axes
from ddpdebug.preflight.output.results import Plot, Series
from ddpdebug.sinks.words import clean, number

#: Pieces of a line with the name of their style ("" for none).
Line = list[tuple[str, str]]

HEIGHT = 10
_MARKS = "•+xo#*"
_BRAILLE = 0x2800
#: The bit of each of the two by four dots, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_MAX_SERIES = len(_MARKS)
_MAX_MARKS = 4
_TITLE = 200


def draw(plot: Plot, width: int, *, height: int = HEIGHT, color: bool = False) -> list[Line]:
    """Return the lines of a plot of at most `width` columns.

    Args:
        color: whether the styles `series 0`, `series 1`, ... will be seen.
    """
    across, up = axes(plot)
    if across.empty or up.empty:
        return [[(clean(plot.title, _TITLE), "bold")], [("  nothing that can be drawn", "dim")]]
    labels = {round((1 - up.place(v)) * (height - 1)): text for v, text in up.ticks(height // 2)}
    margin = max(map(len, labels.values()), default=0) + 1
    columns = max(10, width - margin - 2)
    shown = plot.series[:_MAX_SERIES]
    cells = _cells(shown, across, up, (columns, height), braille=color or len(shown) == 1)
    marks = [(x, text) for x, text in plot.marks if 0 <= across.place(x) <= 1][:_MAX_MARKS]
    places = {round(across.place(x) * (columns - 1)) for x, _ in marks}
    lines: list[Line] = [[(clean(plot.title, _TITLE), "bold")]]
    if label := clean(plot.y_label, _TITLE):
        lines.append([(f"{'':{margin}}{label}", "dim")])
    for row in range(height):
        lines.append([(f"{labels.get(row, ''):>{margin}}{'┤' if row in labels else '│'}", "dim")])
        lines[-1] += [cells.get((column, row), _empty(column in places)) for column in range(columns)]
    base = "".join("▲" if column in places else "─" for column in range(columns))
    lines.append([(f"{'':{margin}}└{base}", "dim")])
    lines.append([(f"{'':{margin + 1}}{_numbers(across, columns)}", "dim")])
    lines.append([(f"{'':{margin + 1}}{clean(plot.x_label, _TITLE):^{columns}}".rstrip(), "dim")])
    lines += [[(f"{'':{margin + 1}}▲ {number(x, 3)}: {clean(text, _TITLE)}", "")] for x, text in marks]
    return [*lines, *_legend(plot, margin, color=color)]


def _empty(marked: bool) -> tuple[str, str]:  # noqa: FBT001 - there is nothing else to say about an empty cell
    return ("┆", "dim") if marked else (" ", "")


def _legend(plot: Plot, margin: int, *, color: bool) -> list[Line]:
    if len(plot.series) < 2:
        return []
    line: Line = [(" " * (margin + 1), "")]
    for i, series in enumerate(plot.series[:_MAX_SERIES]):
        line.append((f"{'━━' if color else _MARKS[i]} ", f"series {i}"))
        line.append((f"{clean(series.name, 60)}   ", ""))
    more = len(plot.series) - _MAX_SERIES
    if more > 0:
        line.append((f"and {more} more", "dim"))
    return [line]


def _cells(
    shown: tuple[Series, ...], across: Axis, up: Axis, size: tuple[int, int], *, braille: bool
) -> dict[tuple[int, int], tuple[str, str]]:
    """Return what stands in the cells that are not empty; of lines that cross, the first is seen."""
    found: dict[tuple[int, int], tuple[str, str]] = {}
    fine = (2, 4) if braille else (1, 1)
    grid = (size[0] * fine[0], size[1] * fine[1])
    for i, series in enumerate(shown):
        bits: dict[tuple[int, int], int] = {}
        for x, y in _dots(series, across, up, grid):
            cell = (x // fine[0], y // fine[1])
            bits[cell] = bits.get(cell, 0) | _DOTS[x % fine[0]][y % fine[1]]
        for cell, value in bits.items():
            found.setdefault(cell, (chr(_BRAILLE + value) if braille else _MARKS[i], f"series {i}"))
    return found


def _dots(series: Series, across: Axis, up: Axis, grid: tuple[int, int]) -> Iterator[tuple[int, int]]:
    places: list[tuple[int, int] | None] = []
    for x, y in zip(series.x, series.y, strict=False):
        right, high = across.place(x), up.place(y)
        if math.isnan(right) or math.isnan(high):
            places.append(None)
        else:
            places.append((round(right * (grid[0] - 1)), round((1 - high) * (grid[1] - 1))))
    yield from (place for place in places if place is not None)
    for begin, end in pairwise(places):
        if begin is not None and end is not None:
            steps = max(abs(end[0] - begin[0]), abs(end[1] - begin[1]))
            for i in range(1, steps):
                share = i / steps
                yield (
                    round(begin[0] + share * (end[0] - begin[0])),
                    round(begin[1] + share * (end[1] - begin[1])),
                )


def _numbers(across: Axis, columns: int) -> str:
    """Return the numbers under the axis, each centred below its place, as many as fit."""
    line = [" "] * columns
    free = 0
    for value, text in across.ticks(max(2, columns // 10)):
        start = round(across.place(value) * (columns - 1)) - len(text) // 2
        start = max(0, min(start, columns - len(text)))
        if start >= free:
            line[start : start + len(text)] = text
            free = start + len(text) + 1
    return "".join(line).rstrip()
