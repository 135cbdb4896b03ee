"""How often the sampled tier runs: a function of the gathered rows and the step, so it is the same on every rank."""

from __future__ import annotations

import math
import statistics
from collections import deque

from ddpdebug.observations import Flag
from ddpdebug.steps import Step

#: Steps shorter than this are all checked until `START_STEPS`: most mistakes show early, short steps are those of tests
#: and experiments, and one percent of a very short step buys nothing.
SHORT_SECONDS = 0.1
START_STEPS = 1000
#: The longest interval, early and later: however dear a check is, some are made.
_MAX_INTERVAL_EARLY, _MAX_INTERVAL = 16, 64
_FIRST_DECISION, _DECIDE_EVERY = 2, 32
#: A new interval takes effect this much later, so that no rank has passed the step yet when it learns of it: rows wait
#: for a second, and are then judged. Rows of short steps may come in late.
_LEAD_SECONDS, _MIN_LEAD_STEPS, _MAX_LEAD_STEPS, _LEAD_STEPS_SHORT = 2.0, 4, 16, 64
_WARM_UP = 1
_MIN_AHEAD, _MAX_AHEAD = 2, 256
#: The part of the budget that is spent. The clocks in the hooks and in the thread do not see all that a check costs: it
#: empties caches and shares cores with the training (1.36 % of the step were measured where the clocks saw 1 %).
_SEEN = 0.7


class Schedule:
    """Decides which steps are checked. `due` is called on the training thread, `learn` in the background thread.

    Args:
        budget: share of the run's time that checks may take, for example 0.01.
        every_step: check every step whatever it costs.
    """

    def __init__(self, *, budget: float, every_step: bool) -> None:
        self.budget, self.every_step = budget, every_step
        self.ratio = float("nan")  # smoothed time in ddpdebug / time of the step without it, worst rank
        self._plan: tuple[tuple[int, int], ...] = ((0, 1),)  # (from step, interval), ascending
        self._light: deque[float] = deque(maxlen=_DECIDE_EVERY)
        self._full: deque[float] = deque(maxlen=_DECIDE_EVERY)
        self._base: deque[float] = deque(maxlen=2 * _DECIDE_EVERY)

    def interval(self, step: int) -> int:
        """Return the interval in force at a step."""
        return next((interval for start, interval in reversed(self._plan) if step >= start), self._plan[0][1])

    def due(self, optimizer: int, step: int) -> bool:
        """Tell whether the sampled tier runs at a step."""
        del optimizer
        return self.every_step or step % self.interval(step) == 0

    def ahead(self, seconds: float) -> int:
        """Return a number of steps that take about so long, so that all ranks hear of a step before they reach it."""
        pace = statistics.median(self._base) if self._base else seconds
        return _MIN_AHEAD + min(_MAX_AHEAD, math.ceil(seconds / pace))

    def learn(self, step: Step) -> None:
        """Take the costs of one step of all ranks; every rank calls this with the same steps."""
        if step.step < _WARM_UP or not step.rows:
            return
        rows = [row for row in step.rows.values() if math.isfinite(row.step_seconds)]
        if not rows:
            return
        cost = max(row.overhead_seconds for row in rows)
        base = statistics.median(max(row.step_seconds - row.overhead_seconds, 0.1 * row.step_seconds) for row in rows)
        base = max(base, 1e-6)
        (self._full if step.any(Flag.CHECKED) else self._light).append(cost)
        self._base.append(base)
        ratio = cost / base
        self.ratio = ratio if math.isnan(self.ratio) else 0.95 * self.ratio + 0.05 * ratio
        decides = step.step == _FIRST_DECISION or step.step % _DECIDE_EVERY == 0
        if step.optimizer == 0 and decides and not self.every_step:
            self._decide(step.step)

    def _decide(self, step: int) -> None:
        base = statistics.median_low(self._base)
        short = base < SHORT_SECONDS
        lead = max(_MIN_LEAD_STEPS, min(_MAX_LEAD_STEPS, math.ceil(_LEAD_SECONDS / base)))
        start = step + (_LEAD_STEPS_SHORT if short else lead)
        early = start < START_STEPS
        interval = 1 if early and short else self._affordable(_SEEN * self.budget * base)
        interval = min(interval, _MAX_INTERVAL_EARLY if early else _MAX_INTERVAL)
        if interval != self._plan[-1][1]:
            self._plan = (*self._plan[-7:], (start, interval))

    def _affordable(self, allowed: float) -> int:
        full = statistics.median(self._full) if self._full else 0.0
        light = min(statistics.median(self._light), full) if self._light else 0.0
        spare = allowed - light
        return _MAX_INTERVAL if spare <= 0 else max(1, math.ceil((full - light) / spare))
