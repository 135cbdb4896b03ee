"""How often the sampled tier runs: a function of the gathered rows and the step, so it is the same on every rank."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step

#: Steps shorter than this are all checked at first, until `START_STEPS` or until the checks have taken `START_SECONDS`
#: of the run: most mistakes show early, short steps are those of tests and experiments, and one percent of a very short
#: step buys nothing. A long job must not pay for that by the step.
SHORT_SECONDS = 0.1
START_STEPS, START_SECONDS = 1000, 1.0
#: The longest interval, of long steps early on, and else: however dear a check is, some are made.
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
#: A suspicion brings the next full check forward, to a step so far ahead that no rank has reached it when it hears.
_NOTICE_SECONDS = 0.25
#: Checks brought forward: one for so many regular ones in the long run, and so many at once.
_REGULAR_PER_EXTRA, _BURST = 4, 2
#: What jumps: so many times the usual distance from the usual value, of the last steps, once there are enough of them.
_JUMP, _HISTORY, _FEWEST = 8.0, 32, 8
#: ... and by this share of it at least. Losses and norms that hardly move have next to no usual distance.
_LEAST_LOSS, _LEAST_NORM = 0.05, 1.0
#: The norm of reduced gradients is the same on all ranks but for this share.
_SAME_NORM = 1e-5


class Schedule:
    """Decides which steps are checked. `due` is called on the training thread, `learn` in the background thread.

    Args:
        budget: share of the run's time that checks may take, for example 0.01.
        every_step: check every step whatever it costs.
    """

    def __init__(self, *, budget: float, every_step: bool) -> None:
        self.budget, self.every_step = budget, every_step
        self.ratio = float("nan")  # time in ddpdebug on the worst rank / time without it, over the newest steps
        self._plan: tuple[tuple[int, int], ...] = ((0, 1),)  # (from step, interval), ascending
        self._light: deque[float] = deque(maxlen=_DECIDE_EVERY)
        self._full: deque[float] = deque(maxlen=_DECIDE_EVERY)
        self._base: deque[float] = deque(maxlen=2 * _DECIDE_EVERY)
        self._costs: deque[float] = deque(maxlen=2 * _DECIDE_EVERY)
        self._spent = 0.0  # in full checks, so far
        self._whole = [0.0, 0.0]  # time in ddpdebug and without it, of all steps
        self._extra: tuple[int, ...] = ()  # newest steps whose check was brought forward; replaced as a whole
        self._signs: dict[int, Signs] = {}  # by optimizer

    def follow(self, *, budget: float, every_step: bool) -> None:
        """Take over the settings of rank 0: the ranks must check the same steps."""
        self.budget, self.every_step = budget, every_step

    @property
    def ratio_of_run(self) -> float:
        """What `ratio` is over all steps so far but the first, which begins with the script."""
        cost, base = self._whole
        return cost / base if base else float("nan")

    def interval(self, step: int) -> int:
        """Return the interval in force at a step."""
        plan = self._plan  # replaced as a whole by the background thread
        return next(iter([interval for start, interval in reversed(plan) if step >= start]), plan[0][1])

    def due(self, optimizer: int, step: int) -> bool:
        """Tell whether the sampled tier runs at a step."""
        del optimizer
        return self.every_step or step % self.interval(step) == 0 or step in self._extra

    def ahead(self, seconds: float) -> int:
        """Return a number of steps that take about so long, so that all ranks hear of a step before they reach it."""
        pace = statistics.median(self._base) if self._base else seconds
        return _MIN_AHEAD + min(_MAX_AHEAD, math.ceil(seconds / pace))

    def bring_forward(self, progress: int) -> None:
        """Check a step soon, because of a suspicion; every rank calls this at the same place among the rows.

        Args:
            progress: the newest step that any rank has reached.
        """
        step = progress + self.ahead(_NOTICE_SECONDS)
        interval = self.interval(step)
        window = _BURST * _REGULAR_PER_EXTRA * interval
        soon = any([self.interval(s) == 1 or s % self.interval(s) == 0 for s in range(progress + 1, step + 1)])
        spent = sum(s > step - window for s in self._extra)
        if not (soon or spent >= _BURST or max(self._extra, default=-1) > progress):
            self._extra = (*self._extra[-15:], step)

    def learn(self, step: Step, progress: int | None = None) -> None:
        """Take the costs of one step of all ranks, and what looks suspicious; all call this with the same steps.

        Args:
            progress: the newest step that any rank has reached; that of `step` by default.
        """
        if self._signs.setdefault(step.optimizer, Signs()).see(step):
            self.bring_forward(step.step if progress is None else progress)
        rows = [row for row in step.rows.values() if math.isfinite(row.step_seconds)]
        if not rows:
            return
        cost = max(row.overhead_seconds for row in rows)
        base = statistics.median(max(row.step_seconds - row.overhead_seconds, 0.1 * row.step_seconds) for row in rows)
        base = max(base, 1e-6)
        if step.step:  # the first one begins with the script
            self._whole[0] += cost
            self._whole[1] += base
        if step.step < _WARM_UP:
            return
        checked = step.any(Flag.CHECKED)
        (self._full if checked else self._light).append(cost)
        self._base.append(base)
        self._costs.append(cost)
        self._spent += cost if checked else 0.0
        self.ratio = sum(self._costs) / sum(self._base)
        decides = step.step == _FIRST_DECISION or step.step % _DECIDE_EVERY == 0
        if step.optimizer == 0 and decides and not self.every_step:
            self._decide(step.step)

    def _decide(self, step: int) -> None:
        base = statistics.median_low(self._base)
        short = base < SHORT_SECONDS
        lead = max(_MIN_LEAD_STEPS, min(_MAX_LEAD_STEPS, math.ceil(_LEAD_SECONDS / base)))
        start = step + (_LEAD_STEPS_SHORT if short else lead)
        early = start < START_STEPS
        soon = self._spent + (start + _DECIDE_EVERY - step) * statistics.median_low(self._full or (0.0,))
        every = early and short and soon <= START_SECONDS
        interval = 1 if every else self._affordable(_SEEN * self.budget * base)
        if interval > _MAX_INTERVAL_EARLY:  # each 64th step is checked however often a long interval changes
            interval = _MAX_INTERVAL // 2 if interval <= _MAX_INTERVAL // 2 else _MAX_INTERVAL
        interval = min(interval, _MAX_INTERVAL_EARLY if early and not short else _MAX_INTERVAL)
        if interval != self._plan[-1][1]:
            self._plan = (*self._plan[-7:], (start, interval))

    def _affordable(self, allowed: float) -> int:
        full = statistics.median(self._full) if self._full else 0.0
        light = min(statistics.median(self._light), full) if self._light else 0.0
        spare = allowed - light
        return _MAX_INTERVAL if spare <= 0 else max(1, math.ceil((full - light) / spare))


class Signs:
    """Suspicious changes in the rows of one optimizer's steps: jumps of loss or norm, skips, a rank that is absent."""

    def __init__(self) -> None:
        self._losses: dict[int, deque[float]] = {}
        self._norms: deque[float] = deque(maxlen=_HISTORY)
        self._scales: dict[int, float] = {}
        self._shown: frozenset[str] = frozenset()

    def see(self, step: Step) -> bool:
        """Take a step; tell whether it begins to show a sign. One that stays is told of once."""
        if step.world < 2 or not step.rows:
            return False
        found = {
            "loss": self._loss_of_few_jumps(step),
            "norm": self._norm_jumps(step),
            "parted norms": _norms_part(step),
            "skipped": step.any(Flag.SKIPPED) or step.any(Flag.GUARD_SKIPPED),
            "scale": self._scale_changes(step),
            "absent": not step.complete,
        }
        shown = frozenset(name for name, is_there in found.items() if is_there)
        new, self._shown = shown - self._shown, shown
        return bool(new)

    def _loss_of_few_jumps(self, step: Step) -> bool:
        """Tell whether the losses of some ranks, and not of most, leave what these ranks' losses were."""
        few = []
        for rank, row in step.rows.items():
            history = self._losses.setdefault(rank, deque(maxlen=_HISTORY))
            if row.has(Flag.LOSS_NONFINITE) or _jumps(row.loss, history, _LEAST_LOSS):
                few.append(rank)
            if math.isfinite(row.loss):
                history.append(row.loss)
        return 0 < 2 * len(few) <= len(step.rows)

    def _norm_jumps(self, step: Step) -> bool:
        norms = [row.clip_norm for row in step.rows.values() if math.isfinite(row.clip_norm)]
        if not norms:
            return False
        norm = statistics.median(norms)
        jumped = _jumps(norm, self._norms, _LEAST_NORM)
        self._norms.append(norm)
        return jumped

    def _scale_changes(self, step: Step) -> bool:
        scales = {rank: row.loss_scale for rank, row in step.rows.items() if math.isfinite(row.loss_scale)}
        changed = any([self._scales.get(rank, scale) != scale for rank, scale in scales.items()])
        self._scales.update(scales)
        return changed


def _jumps(value: float, history: Sequence[float], least: float) -> bool:
    if len(history) < _FEWEST or not math.isfinite(value):
        return False
    usual = statistics.median(history)
    distance = 1.5 * statistics.median(abs(v - usual) for v in history)
    return abs(value - usual) > max(_JUMP * distance, least * abs(usual))


def _norms_part(step: Step) -> bool:
    """Tell whether the ranks clip by different norms, which they do not where they hold the same gradients."""
    if step.any(Flag.CLIPPED_BEFORE_SYNC) or step.any(Flag.LOCAL_ONLY):
        return False
    norms = [row.clip_norm for row in step.rows.values() if math.isfinite(row.clip_norm)]
    return len(norms) > 1 and max(norms) - min(norms) > _SAME_NORM * max(norms)
