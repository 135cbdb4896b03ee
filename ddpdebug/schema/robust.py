"""Robust statistics, which a few outliers do not move: median, spread and their errors. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

#: The standard error of a normal distribution's median / that of its mean.
MEDIAN_ERROR = 1.2533
_STANDARD = 1.4826  # a normal distribution's standard deviation / median absolute deviation


def middle(values: Iterable[float]) -> float:
    """Return the median; 0 of an empty sequence."""
    found = list(values)
    return statistics.median(found) if found else 0.0


def deviation(distances: Iterable[float]) -> float:
    """Return the robust standard deviation, from the distances to the median."""
    return _STANDARD * middle(distances)


def spread(values: Sequence[float], around: float | None = None) -> float:
    """Return the robust standard deviation of values around their median, or around a given value."""
    usual = middle(values) if around is None else around
    return deviation(abs(value - usual) for value in values)
