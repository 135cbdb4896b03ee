"""Draws a plot as SVG, without library or script; lines differ in colour and in dashes. Pure."""

from __future__ import annotations

import math
from html import escape

from ddpdebug.preflight.output.axes import Axis, axes
from ddpdebug.preflight.output.results import Plot, Series
from ddpdebug.reports.html import path
from ddpdebug.sinks.words import clean, number

#: Okabe and Ito's palette, which people with every kind of colour vision tell apart, darkest first.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4")
_WIDTH, _HEIGHT = 620, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 14, 14, 46
_MARK_ROW = 15
_MAX_SERIES = 24
_MAX_POINTS = 2000
_MAX_MARKS = 6
_TITLE = 200


def svg(plot: Plot) -> str:
    """Return the plot with its title and legend, as HTML."""
    across, up = axes(plot)
    title = escape(clean(plot.title, _TITLE))
    if across.empty or up.empty:
        return f'<figure><figcaption>{title}</figcaption><p class="none">nothing that can be drawn</p></figure>'
    marks, left = _arranged(plot, across)
    top = _TOP + _MARK_ROW * len(marks)
    shown = plot.series[:_MAX_SERIES]
    parts = [_frame(plot, across, up, top), *(_mark(across, mark, i, left=left) for i, mark in enumerate(marks))]
    # the first line is the one that matters: it is drawn last, above the others
    parts += [_line(shown[i], across, up, top, i) for i in reversed(range(len(shown)))]
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{title}</figcaption>{picture}{_legend(plot)}</figure>"


def _x(across: Axis, value: float) -> float:
    return _LEFT + across.place(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(up: Axis, value: float, top: int) -> float:
    return top + (1 - up.place(value)) * (_HEIGHT - _BOTTOM - top)


def _frame(plot: Plot, across: Axis, up: Axis, top: int) -> str:
    bottom = _HEIGHT - _BOTTOM
    parts = []
    for value, text in up.ticks(6):
        y = _y(up, value, top)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for value, text in across.ticks(9):
        x = _x(across, value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{escape(text)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    x_label, y_label = (escape(clean(label, 80)) for label in (plot.x_label, plot.y_label))
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{x_label}</text>')
    turned = f'transform="rotate(-90 12 {(top + bottom) / 2:.0f})"'
    parts.append(f'<text x="12" y="{(top + bottom) / 2:.0f}" text-anchor="middle" {turned}>{y_label}</text>')
    return "".join(parts)


def _arranged(plot: Plot, across: Axis) -> tuple[list[tuple[float, str]], bool]:
    """Return the marks by row, and whether their texts stand on the left: so that no text crosses another's line."""
    marks = [(x, clean(text, 60)) for x, text in plot.marks if 0 <= across.place(x) <= 1][:_MAX_MARKS]
    left = sum(across.place(x) for x, _ in marks) > len(marks) / 2
    return sorted(marks, reverse=left), left


def _mark(across: Axis, mark: tuple[float, str], row: int, *, left: bool) -> str:
    """Draw a vertical line, its text beside its upper end."""
    x, y = _x(across, mark[0]), _TOP + _MARK_ROW * row
    place = f'x="{x + (-5 if left else 5):.1f}" y="{y + 4}" text-anchor="{"end" if left else "start"}"'
    line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 6}" y2="{_HEIGHT - _BOTTOM}"/>'
    return f'{line}<text class="marked" {place}>{escape(mark[1])} ({number(mark[0], 3)})</text>'


def _line(series: Series, across: Axis, up: Axis, top: int, index: int) -> str:
    points = list(zip(series.x, series.y, strict=False))
    points = points[:: max(1, math.ceil(len(points) / _MAX_POINTS))]
    drawn = path((_x(across, x), _y(up, y, top)) for x, y in points)
    return f'<path d="{drawn}" fill="none" {_look(index)} stroke-width="{2 if index == 0 else 1.4}"/>'


def _look(index: int) -> str:
    dashes = _DASHES[index % len(_DASHES)] or "none"
    return f'stroke="{COLORS[index % len(COLORS)]}" stroke-dasharray="{dashes}"'


def _legend(plot: Plot) -> str:
    if len(plot.series) < 2:
        return ""
    parts = []
    for i, series in enumerate(plot.series[:_MAX_SERIES]):
        key = f'<svg class="key" viewBox="0 0 28 8"><path d="M0 4H28" {_look(i)} stroke-width="3"/></svg>'
        parts.append(f"<span>{key}{escape(clean(series.name, 80))}</span>")
    more = len(plot.series) - _MAX_SERIES
    parts += [f"<span>and {more} more</span>"] if more > 0 else []
    return f'<p class="legend">{"".join(parts)}</p>'
