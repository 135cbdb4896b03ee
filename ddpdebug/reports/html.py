"""Parts of self-contained HTML pages: the head, and series as SVG in the dashboards' colours; no script. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise

from ddpdebug.reports.pace import Cell, PaceHistory
from ddpdebug.schema.pace import PHASES
from ddpdebug.sinks.words import clean, number, percent, ranks_text

#: The policy forbids scripts and every request, should something have slipped through.
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; \
base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
"""

Points = Sequence[tuple[int, float]]

COLORS = {
    "highest rank": "#D55E00",
    "median rank": "#0072B2",
    "lowest rank": "#56B4E9",
    "validation": "#E69F00",
    "data": "#CC79A7",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#E69F00",
    "other": "#888888",
    "waiting": "currentColor",
    "host": "#009E73",
    "device reserved": "#0072B2",
    "device allocated": "#56B4E9",
}
_GOOD, _BAD = "#009E73", "#C62828"
_WIDTH, _HEIGHT = 900, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 110, 12, 10, 26
_ROW = 22
_MAX_TICKS = 12
#: Values that are further apart than this are drawn in powers of ten.
_WIDE = 50
#: From which excess on, as a share of the step, a cell is how opaque; below the first it is like the others.
_DEPTHS = ((0.05, 0.3), (0.1, 0.5), (0.2, 0.75), (0.4, 1.0))
#: Up to so many rows, heights of a row; the last for any number.
_HEIGHTS = ((16, 22), (32, 15), (1 << 30, 10))


def page_head(title: str, style: str) -> str:
    """Return the beginning of a page, up to the start of its body.

    Args:
        title: escaped already.
        style: rules of CSS, each line ended.
    """
    return f"{_HEAD.format(title=title)}{style}</style></head><body>\n"


#: What shows the colours in legends: classes, as the policy of a page may forbid attributes of style.
SWATCHES = "".join(f".c{color.strip('#')} {{ background: {color}; }}\n" for color in sorted({*COLORS.values()}))


def lines(
    series: Mapping[str, Points],
    steps: tuple[int, int],
    marks: Mapping[int, str],
    unit: str = "",
    colors: Mapping[str, str] = COLORS,
) -> str:
    """Return a chart of lines; gaps stay gaps. Marks are steps with a text, `colors` one of COLORS for each series."""
    values = [value for points in series.values() for _, value in points if math.isfinite(value)]
    if not values:
        return '<p class="none">nothing was recorded</p>'
    scale = _Scale(min(values), max(values))
    parts = [_frame(scale, steps, unit), _marks(steps, marks, _HEIGHT - _BOTTOM)]
    for name, points in series.items():
        drawn = path([(_x(step, steps), scale.y(value)) for step, value in points])
        parts.append(f'<path d="{drawn}" fill="none" stroke="{colors[name]}" stroke-width="1.5"/>')
    legend = "".join(f'<span><i class="c{colors[name].strip("#")}"></i>{escape(name)}</span>' for name in series)
    return f'{_svg(_HEIGHT, parts)}<p class="legend">{legend}</p>'


def timeline(rows: Mapping[str, Points], steps: tuple[int, int], marks: Mapping[int, str]) -> str:
    """Return a chart with a row for each comparison: green while the ranks agree, red and hatched while they differ."""
    height = _TOP + _ROW * len(rows) + _BOTTOM
    parts = [_marks(steps, marks, height - _BOTTOM)]
    for i, (name, points) in enumerate(rows.items()):
        y = _TOP + _ROW * i
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 15}" text-anchor="end">{escape(name.replace("_", " "))}</text>')
        known = [(step, value > 0) for step, value in points if math.isfinite(value)]
        for begin, end, differs in _runs(known, steps[1]):
            x, width = _x(begin, steps), max(1.5, _x(end, steps) - _x(begin, steps))
            color, word = (_BAD, "differ") if differs else (_GOOD, "agree")
            place = f'x="{x:.1f}" y="{y + (2 if differs else 6)}" width="{width:.1f}" height="{18 if differs else 10}"'
            parts.append(f'<rect {place} fill="{color}"><title>{word} from step {begin}</title></rect>')
    parts.append(_ticks(steps, height))
    return _svg(height, parts)


def parting(
    world: int, groups: Sequence[Sequence[int]], steps: tuple[int, int], step: int, words: str, *, undecided: bool
) -> str:
    """Return a chart with a line for each rank: together until `step`, then apart by group.

    Args:
        groups: of ranks; the first is the one that is right, unless that is `undecided`.
        words: what came up in that step.
    """
    size = next(height for count, height in _HEIGHTS if world <= count)
    bottom, x = _TOP + size * world, _x(min(max(step, steps[0]), steps[1]), steps)
    of = {rank: number for number, group in enumerate(groups) for rank in group}
    together = len(groups) == 1  # none is apart from another
    word = "with all others" if together else "parted"
    parts: list[str] = []
    for rank in range(world):
        y = _TOP + size * (rank + 0.5)
        number = of.get(rank, 0)
        odd = undecided or number > 0 or together
        name = f"rank {rank}: {'in group ' + str(number + 1) if undecided else word if odd else 'as most'}"
        if rank % max(1, math.ceil(12 / size)) == 0:
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<line x1="{_LEFT}" x2="{x:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GOOD}" stroke-width="3"/>')
        color, dashes = (_BAD, f' stroke-dasharray="{3 + 6 * number} 3"') if odd else (_GOOD, "")
        after = f'x1="{x:.1f}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}" stroke-width="3"'
        parts.append(f"<line {after}{dashes}><title>{escape(name)}</title></line>")
    mark = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}">'
    parts += [f"{mark}<title>{escape(words)}</title></line>", _ticks(steps, bottom + _BOTTOM)]
    legend = "dashed and red: on all ranks alike" if together else "solid: as the others; dashed and red: parted"
    legend = "dashed and red: the groups, by dash" if undecided else legend
    return f'{_svg(bottom + _BOTTOM, parts, words)}<p class="legend">{legend}; the upright line is step {step}</p>'


def heat_map(found: PaceHistory, steps: tuple[int, int], marks: Mapping[int, str]) -> str:
    """Return a heat map, a row for each rank or for neighbouring ranks: own time beyond that of the median rank.

    The colour is the phase in which most of that was, its strength how much it was.
    """
    rows = found.rows()
    size = next(height for count, height in _HEIGHTS if len(rows) <= count)
    bottom = _TOP + size * len(rows)
    cells: list[str] = []
    for begin, last, known in found.spans():
        x, width = _x(begin, steps), max(1.5, _x(min(last + 1, steps[1]), steps) - _x(begin, steps))
        for row, cell in known.items():
            place = f'x="{x:.1f}" y="{_TOP + size * row}" width="{width:.1f}" height="{size - 1}"'
            cells.append(_heat(place, cell, f"steps {begin} to {last}"))
    labels = []
    every = max(1, math.ceil(12 / size))
    for row in range(0, len(rows), every):
        place = f'x="{_LEFT - 6}" y="{_TOP + size * (row + 0.5) + 4:.1f}" text-anchor="end"'
        labels.append(f"<text {place}>{ranks_text(rows[row])}</text>")
    parts = [*labels, *cells, _marks(steps, marks, bottom), _ticks(steps, bottom + _BOTTOM)]
    swatches = [f'<span><i style="background:{COLORS[phase]}"></i>{phase}</span>' for phase in PHASES]
    grey = COLORS["other"]
    shades = [f'<span><i style="background:{grey};opacity:{depth}"></i>{percent(at)}</span>' for at, depth in _DEPTHS]
    legend = (
        f"longer than the median rank by at least {''.join(shades)} of the step, and by more "
        f"than the ranks scatter<br>most of that in {''.join(swatches)}"
    )
    label = "Own time of each rank over the steps, compared with the median rank; the table below has it in words."
    return f'{_svg(bottom + _BOTTOM, parts, label)}<p class="legend">{legend}</p>'


def _heat(place: str, cell: Cell, steps: str) -> str:
    depth = max((depth for at, depth in _DEPTHS if cell.excess >= max(at, cell.noise)), default=0.0)
    words = f"rank {cell.rank}, {steps}: {_shown(cell.own, 's')} a step"
    if not depth:
        return f'<rect {place} class="even"><title>{words}</title></rect>'
    more = f"{words}, {percent(cell.excess)} of it more than the median rank, mostly in {cell.phase}"
    return f'<rect {place} fill="{COLORS[cell.phase]}" opacity="{depth}"><title>{more}</title></rect>'


def _runs(known: Sequence[tuple[int, bool]], last: int) -> list[tuple[int, int, bool]]:
    """Join neighbours of the same kind: (first step, step after, differs)."""
    starts = [point for i, point in enumerate(known) if i == 0 or known[i - 1][1] != point[1]]
    return [(step, after, differs) for (step, differs), (after, _) in pairwise([*starts, (last + 1, False)])]


def _svg(height: int, parts: Sequence[str], label: str = "") -> str:
    named = f' aria-label="{escape(label)}"' if label else ""
    return f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {height}" role="img"{named}>{"".join(parts)}</svg></div>'


def _x(step: float, steps: tuple[int, int]) -> float:
    return _LEFT + (step - steps[0]) / max(1, steps[1] - steps[0]) * (_WIDTH - _LEFT - _RIGHT)


class _Scale:
    """Values to heights: from zero where that wastes little, in powers of ten where the largest would flatten all."""

    def __init__(self, low: float, high: float) -> None:
        self.log = low > 0 and high / low > _WIDE
        low = min(low, 0.0) if not self.log and 0 <= low < 0.5 * high else low
        if low == high:
            low, high = low - abs(low) / 10 - 1e-9, high + abs(high) / 10 + 1e-9
        self._low, self._high = self._position(low), self._position(high)
        if not self.log:
            self._step = round_step(self._high / 4 - self._low / 4)
            self._low = math.floor(self._low / self._step + 1e-9) * self._step
            self._high = math.ceil(self._high / self._step - 1e-9) * self._step

    def _position(self, value: float) -> float:
        if not self.log:
            return value
        return math.log10(value) if value > 0 else math.nan

    def y(self, value: float) -> float:
        share = (self._high - self._position(value)) / (self._high - self._low)
        return _TOP + share * (_HEIGHT - _TOP - _BOTTOM)

    def ticks(self) -> list[float]:
        if not self.log:
            count = round(self._high / self._step - self._low / self._step)
            return [(round(self._low / self._step) + i) * self._step for i in range(min(count, _MAX_TICKS) + 1)]
        first, last = math.ceil(self._low - 1e-9), math.floor(min(self._high, 308.0) + 1e-9)  # beyond: no number
        every = max(1, math.ceil((last - first) / 5))
        powers = [10.0**power for power in range(first, last + 1, every)]
        return powers if len(powers) > 1 else [10**self._low, *powers, 10 ** min(self._high, 308.0)]


def round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is no less than `least`."""
    if not (0 < least < 1e300):
        return least or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= least * (1 - 1e-9)), 10 * power)


def _frame(scale: _Scale, steps: tuple[int, int], unit: str) -> str:
    parts = []
    for value in scale.ticks():
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(_shown(value, unit))}</text>')
    return "".join([*parts, _ticks(steps, _HEIGHT)])


def _ticks(steps: tuple[int, int], height: int) -> str:
    every = max(1, int(round_step((steps[1] - steps[0]) / 6)))
    first = -(-steps[0] // every) * every
    near = steps[1] - every // 2  # no room for a text beside that of the last step
    places = range(first, near, every)
    texts = [f'<text x="{_x(s, steps):.1f}" y="{height - 8}" text-anchor="middle">{s}</text>' for s in places]
    last = f'<text x="{_WIDTH}" y="{height - 8}" text-anchor="end">{steps[1]}</text>'  # as long as it may be
    return "".join([*texts, last])


def _marks(steps: tuple[int, int], marks: Mapping[int, str], bottom: int) -> str:
    parts = []
    for step, text in marks.items():
        if steps[0] <= step <= steps[1]:
            x = _x(step, steps)
            line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}">'
            parts.append(f"{line}<title>{escape(text)}</title></line>")
    return "".join(parts)


def _shown(value: float, unit: str) -> str:
    if unit == "bytes":
        for name, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if abs(value) >= size:
                return f"{number(value / size, 3)} {name}"
    if unit == "s" and 0 < abs(value) < 0.1:
        return f"{number(1000 * value, 3)} ms"
    return f"{number(value, 3)} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Return a time with its unit, to three digits: `12.5 ms`, `3.1 s`, `14.2 min`, `2.5 h`; empty if unknown."""
    if not math.isfinite(seconds):
        return ""
    for name, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size * 1.5:
            return f"{number(seconds / size, 3)} {name}"
    return _shown(seconds, "s")


def text(value: object, limit: int = 300) -> str:
    """Return a value as escaped text on one line of at most `limit` characters; empty for None."""
    return escape(clean("" if value is None else value, limit))


def path(places: Iterable[tuple[float, float]]) -> str:
    """Return the `d` of an SVG path through points in pixels, with a gap at points that are not finite."""
    words, pen = [], "M"
    for x, y in places:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        words.append(f"{pen}{x:.1f} {y:.1f}")
        words += ["h0.1"] if pen == "M" else []  # a lone point shows
        pen = "L"
    return "".join(words)
