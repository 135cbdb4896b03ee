"""The slowest rank of a step, and the cost of its delay. Pure and torch-free.

Ranks that train together move at the pace of the slowest. What a rank costs is what the step would have been shorter
with the median of the others' times in the place of its own: the what-if definition of Lin et al., "Understanding
Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025), for the times of a whole step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.step import Step

PHASES = tuple(Row().own_phases)


def own_times(step: Step) -> dict[int, float]:
    """Return rank -> the rank's own seconds in the step, for ranks with known times.

    The first step is nobody's pace: it has the start of the script and the compilation in it.
    """
    found = {rank: row.own_seconds for rank, row in step.rows.items() if not row.has(Flag.FIRST)}
    return {rank: seconds for rank, seconds in found.items() if math.isfinite(seconds)}


def behind(own: Mapping[int, float]) -> dict[int, float]:
    """Return rank -> its seconds beyond the median of the others; empty for one rank."""
    ordered = sorted(own.values())
    return {rank: seconds - median_without(ordered, seconds) for rank, seconds in own.items() if len(own) > 1}


def median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of sorted values without one of them, which is found by bisection."""
    at, half = bisect_left(ordered, value), (len(ordered) - 1) // 2
    high = ordered[half if half < at else half + 1]
    if len(ordered) % 2 == 0:
        return high
    return (ordered[half - 1 if half - 1 < at else half] + high) / 2


def costs(own: Mapping[int, float]) -> dict[int, float]:
    """Return rank -> the seconds by which the step would be shorter if the rank took the others' median time.

    Only the slowest rank costs anything: 0 for all others, and empty for one rank.
    """
    if len(own) < 2:
        return {}
    last = max(own, key=lambda rank: own[rank])
    second = max(seconds for rank, seconds in own.items() if rank != last)
    return {rank: own[last] - second if rank == last else 0.0 for rank in own}
