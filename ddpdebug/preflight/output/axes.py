"""Plot axes: positions of values, and ticks with their labels, in the terminal and on the page. Pure.

What cannot be drawn (NaN, infinities, values that are not positive on a logarithmic axis) has no place: a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ddpdebug.preflight.output.results import Plot
from ddpdebug.sinks.words import number

#: Steps between the numbers of an axis, times a power of ten: those that people count in.
_STEPS = (1, 2, 5, 10)
#: Below this ratio between the ends a logarithmic axis carries the same numbers as a plain one.
_NARROW = 8.0
#: A constant is drawn in the middle of a range this much wider than itself.
_MARGIN = 0.05


class Axis:
    """A plot axis: maps values to positions between 0 and 1.

    Args:
        values: all that is to be shown.
        log: whether equal ratios are equally far apart.
    """

    def __init__(self, values: Iterable[float], *, log: bool) -> None:
        self.log = log
        drawn = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        self.empty = not drawn
        low, high = (min(drawn), max(drawn)) if drawn else (1.0, 1.0)
        if low == high:
            room = _MARGIN * abs(low) or 1.0
            low, high = low - room, high + room
        self.low, self.high = low, high
        self._from, self._to = self._position(low), self._position(high)

    def _position(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def place(self, value: float) -> float:
        """Return the position of a value, 0 at the low end and 1 at the high end; NaN if it cannot be drawn."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return math.nan
        # halves, so that the distance of two huge values is still a number
        return (self._position(value) / 2 - self._from / 2) / (self._to / 2 - self._from / 2)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return at most about `most` tick values, each with its label."""
        if self.log and self.high / self.low >= _NARROW:
            return self._decades(most)
        return _even(self.low, self.high, most)

    def _decades(self, most: int) -> list[tuple[float, str]]:
        first, last = math.ceil(self._from - 1e-9), math.floor(self._to + 1e-9)
        stride = max(1, math.ceil((last - first + 1) / most))
        found = [10.0**power for power in range(first, last + 1, stride)]
        if len(found) < 3 <= most:
            powers = range(math.floor(self._from), math.ceil(self._to) + 1)
            values = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            found = [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]
        return [(value, number(value, 3)) for value in found[:most]]


def _even(low: float, high: float, most: int) -> list[tuple[float, str]]:
    width = (high / 2 - low / 2) / max(1, most - 1) * 2
    if not math.isfinite(width) or width <= 0:
        return [(low, number(low, 3))]
    unit = 10.0 ** math.floor(math.log10(width))
    step = next((factor * unit for factor in _STEPS if factor * unit >= width * 0.999), 10 * unit)
    if step <= 0 or not math.isfinite(step):
        return [(low, number(low, 3))]
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    digits = max(3, 1 + math.floor(math.log10(max(abs(low), abs(high)) / step) + 1e-9) + 1)
    return [(i * step, number(i * step or 0.0, min(digits, 12))) for i in range(first, min(last, first + 20) + 1)]


def axes(plot: Plot) -> tuple[Axis, Axis]:
    """Return the two axes of a plot, which span its finite points."""
    points = [(x, y) for series in plot.series for x, y in zip(series.x, series.y, strict=False) if math.isfinite(y)]
    return (
        Axis([x for x, _ in points], log=plot.log_x),
        Axis([y for _, y in points], log=plot.log_y),
    )
