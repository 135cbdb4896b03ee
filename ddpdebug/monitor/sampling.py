"""The schedule of steps that are watched and of steps that are checked in full; the same on every rank.

Both are functions of the gathered rows and the step's number. A step that is not watched runs as it would without
ddpdebug but for a few tests of a flag: it is counted, and has no row.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.step import Step

#: Steps shorter than this are all checked at first, until `START_STEPS` or until the checks have taken `START_SECONDS`
#: of the run: most mistakes show early, short steps are those of tests and experiments, and one percent of a very short
#: step buys nothing. A long job must not pay for that by the step.
SHORT_SECONDS = 0.1
START_STEPS, START_SECONDS = 1000, 0.5
#: So many steps are all watched, whatever that costs.
WATCHED_STEPS = 64
#: The longest interval of checks, of long steps early on, and else: however dear a check is, some are made.
_MAX_INTERVAL_EARLY, _MAX_INTERVAL = 16, 64
#: ... but no more than one a second; some step is watched that often whatever it costs.
_LEAST_SECONDS = 1.0
_FIRST_DECISION, _DECIDE_EVERY = 2, 32
#: A new interval takes effect this much later, so that no rank has passed the step yet when it learns of it: rows wait
#: for a second, and are then judged.
_LEAD_SECONDS, _MIN_LEAD_STEPS, _MAX_LEAD_STEPS = 0.5, 4, 16
_WARM_UP = 1
_MIN_AHEAD, _MAX_AHEAD = 2, 1 << 16
#: The part of the budget that is spent. The clocks in the hooks and in the thread do not see all that a check costs: it
#: empties caches and shares cores with the training (1.36 % of the step were measured where the clocks saw 1 %).
_SEEN = 0.7
#: The part of it that is for watching; the rest is for the full checks.
_WATCHING = 0.5
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


@dataclass(frozen=True, slots=True)
class _Plan:
    """Every how many steps one is checked and watched, from a step on that each optimizer counts for itself."""

    starts: Mapping[int, int]  # by optimizer
    later: int  # of optimizers that have not stepped yet
    checked: int
    watched: int

    def holds(self, optimizer: int, step: int) -> bool:
        return step >= self.starts.get(optimizer, self.later)


class Schedule:
    """Decides which steps are watched and checked. `watched` and `due` are called on the training thread, `learn` not.

    Args:
        budget: share of the run's time that ddpdebug may take, for example 0.01.
        every_step: check every step whatever it costs.
    """

    def __init__(self, *, budget: float, every_step: bool) -> None:
        self.budget, self.every_step = budget, every_step
        self.ratio = float("nan")  # time in ddpdebug on the worst rank / time without it, over the newest steps
        self._plans: tuple[_Plan, ...] = (_Plan({}, 0, 1, 1),)  # the newest last
        self._light: deque[float] = deque(maxlen=_DECIDE_EVERY)
        self._full: deque[float] = deque(maxlen=_DECIDE_EVERY)
        self._base: deque[float] = deque(maxlen=2 * _DECIDE_EVERY)
        self._costs: deque[float] = deque(maxlen=2 * _DECIDE_EVERY)
        self._whole_base: deque[float] = deque(maxlen=2 * _DECIDE_EVERY)  # steps that are not watched included
        self._spent = 0.0  # in full checks, so far
        self._whole = [0.0, 0.0]  # time in ddpdebug and without it, of all steps
        self._extra: tuple[int, ...] = ()  # newest steps whose check was brought forward; replaced as a whole
        self._signs: dict[int, Signs] = {}  # by optimizer
        self._newest: dict[int, int] = {}  # step by optimizer
        self._undecided = 0  # rows since the last decision

    def follow(self, *, budget: float, every_step: bool) -> None:
        """Adopt the settings of rank 0: the ranks must check the same steps."""
        self.budget, self.every_step = budget, every_step

    @property
    def ratio_of_run(self) -> float:
        """The overhead ratio over all steps so far except the first, which begins with the script."""
        cost, base = self._whole
        return cost / base if base else float("nan")

    @property
    def seconds_of_run(self) -> float:
        """The seconds that ddpdebug took on the worst rank, over all steps so far except the first."""
        return self._whole[0]

    def interval(self, optimizer: int, step: int) -> int:
        """Return the interval between checked steps, as it is at a step."""
        return self._at(optimizer, step).checked

    def _at(self, optimizer: int, step: int) -> _Plan:
        plans = self._plans  # replaced as a whole by the background thread
        for plan in reversed(plans):
            if plan.holds(optimizer, step):
                return plan
        return plans[0]

    def due(self, optimizer: int, step: int) -> bool:
        """Whether a step is checked in full."""
        return self.every_step or step % self._at(optimizer, step).checked == 0 or step in self._extra

    def watched(self, optimizer: int, step: int) -> bool:
        """Whether a step is watched, which means that it has a row."""
        return step % self._at(optimizer, step).watched == 0 or self.due(optimizer, step)

    def ahead(self, seconds: float) -> int:
        """Return the number of steps in about `seconds`, so that all ranks hear of a step before they reach it."""
        return _MIN_AHEAD + min(_MAX_AHEAD, math.ceil(seconds / self._pace(seconds)))

    def _pace(self, otherwise: float) -> float:
        """Return the seconds from one step to the next, with what ddpdebug takes of them."""
        if not self._base:
            return otherwise
        spans = sum(self._whole_base) / statistics.median(self._base)
        return statistics.median(self._base) + sum(self._costs) / max(1.0, spans)

    def bring_forward(self, progress: int) -> None:
        """Schedule a check soon because of a suspicion; every rank calls this after the same rows.

        Args:
            progress: the newest step that any rank has reached.
        """
        step = progress + self.ahead(_NOTICE_SECONDS)
        interval = self.interval(max(self._newest, key=lambda optimizer: self._newest[optimizer], default=0), step)
        window = _BURST * _REGULAR_PER_EXTRA * interval
        soon = step // interval > progress // interval
        spent = sum(s > step - window for s in self._extra)
        if not (soon or spent >= _BURST or max(self._extra, default=-1) > progress):
            self._extra = (*self._extra[-15:], step)

    def learn(self, step: Step, progress: int | None = None) -> None:
        """Adapt to the cost and the suspicious signs of a step of all ranks; every rank calls this with the same steps.

        Args:
            progress: the newest step that any rank has reached; that of `step` by default.
        """
        progress = step.step if progress is None else progress
        if self._signs.setdefault(step.optimizer, Signs()).see(step):
            self.bring_forward(progress)
        before = self._newest.get(step.optimizer, step.step - 1)
        self._newest[step.optimizer] = max(before, step.step)
        rows = [row for row in step.rows.values() if math.isfinite(row.step_seconds)]
        if not rows:
            return
        cost = max(row.overhead_seconds for row in rows)
        base = max(statistics.median([_without(row) for row in rows]), 1e-6)
        whole = base + max(0, step.step - before - 1) * (statistics.median(self._base) if self._base else base)
        if step.step:  # the first one begins with the script
            self._whole[0] += cost
            self._whole[1] += whole
        if step.step < _WARM_UP:
            return
        checked = step.any(Flag.CHECKED)
        (self._full if checked else self._light).append(cost)
        self._base.append(base)
        self._whole_base.append(whole)
        self._costs.append(cost)
        self._spent += cost if checked else 0.0
        self.ratio = sum(self._costs) / sum(self._whole_base)
        self._undecided += 1
        decides = step.step == _FIRST_DECISION or self._undecided >= _DECIDE_EVERY
        if step.optimizer == 0 and decides and not self.every_step:
            self._undecided = 0
            self._decide(max(step.step, progress))

    def _decide(self, step: int) -> None:
        base = statistics.median_low(self._base)
        short = base < SHORT_SECONDS
        lead = math.ceil(_LEAD_SECONDS / self._pace(base))
        start = step + max(_MIN_LEAD_STEPS, lead if short else min(_MAX_LEAD_STEPS, lead))
        start = max(start, WATCHED_STEPS if short else 0)
        early = start < START_STEPS
        full = statistics.median_low(self._full or (0.0,))
        light = min(statistics.median(self._light), full) if self._light else 0.0
        soon = self._spent + (start + _DECIDE_EVERY - step) * full
        allowed = _SEEN * self.budget * base
        longest = _LEAST_SECONDS / base
        if early and short and soon <= START_SECONDS:
            checked = watched = 1
        else:
            watched = 1 if start < WATCHED_STEPS else _every(light, _WATCHING * allowed, longest)
            spare = allowed - light / watched
            usual = _MAX_INTERVAL_EARLY if early and not short else _MAX_INTERVAL
            checked = _every(full - light, spare, max(usual, longest))
        lead = start - max(self._newest.values())
        starts = {optimizer: newest + lead for optimizer, newest in self._newest.items()}
        *older, last = self._plans
        if (checked, watched) != (last.checked, last.watched):
            self._plans = (*self._plans[-7:], _Plan(starts, WATCHED_STEPS, checked, watched))
        elif any([start < last.starts.get(optimizer, last.later) for optimizer, start in starts.items()]):
            # one that steps rarely is not to wait until it has taken as many steps as the others
            soonest = {optimizer: min(start, last.starts.get(optimizer, start)) for optimizer, start in starts.items()}
            self._plans = (*older, replace(last, starts=soonest))


def _without(row: Row) -> float:
    """Return what a step took without ddpdebug, in seconds.

    At least its phases: the thread in the background, whose time counts as well, works beside them.
    """
    phases = (row.data_seconds, row.forward_seconds, row.backward_seconds, row.optimizer_seconds)
    own = sum([seconds for seconds in phases if seconds > 0.0])  # one that is not known is NaN
    return max(row.step_seconds - row.overhead_seconds, min(own, row.step_seconds), 0.1 * row.step_seconds)


def _every(cost: float, allowed: float, longest: float) -> int:
    """Return every how many steps something can be had at a cost, so that each step pays what is allowed at most.

    From 16 on only powers of two: a long interval that changes with each decision would leave long gaps.
    """
    if cost <= 0:
        return 1
    wanted = max(1, math.ceil(min(cost / allowed if allowed > 0 else longest, longest)))
    if wanted <= _MAX_INTERVAL_EARLY:
        return wanted
    power = 1 << (wanted - 1).bit_length()
    return power if power <= longest else power // 2


class Signs:
    """Suspicious signs in the rows of one optimizer's steps: jumps of loss or norm, skips, an absent rank."""

    def __init__(self) -> None:
        self._losses: dict[int, deque[float]] = {}
        self._norms: deque[float] = deque(maxlen=_HISTORY)
        self._scales: dict[int, float] = {}
        self._shown: frozenset[str] = frozenset()

    def see(self, step: Step) -> bool:
        """Examine a step; return whether a sign begins in it. A lasting sign counts once."""
        if step.world < 2 or not step.rows:
            return False
        found = {
            "loss": self._loss_of_few_jumps(step),
            "norm": self._norm_jumps(step),
            "parted norms": _norms_part(step),
            "skipped": step.any(Flag.SKIPPED) or step.any(Flag.GUARD_SKIPPED),
            "scale": self._scale_changes(step),
            "absent": not step.complete and not step.any(Flag.ALONE),
        }
        shown = frozenset(name for name, is_there in found.items() if is_there)
        new, self._shown = shown - self._shown, shown
        return bool(new)

    def _loss_of_few_jumps(self, step: Step) -> bool:
        """Whether the losses of some ranks, and not of most, leave what these ranks' losses were."""
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
    """Whether the ranks clip by different norms, which they do not where they hold the same gradients."""
    if step.any(Flag.CLIPPED_BEFORE_SYNC) or step.any(Flag.LOCAL_ONLY):
        return False
    norms = [row.clip_norm for row in step.rows.values() if math.isfinite(row.clip_norm)]
    return len(norms) > 1 and max(norms) - min(norms) > _SAME_NORM * max(norms)
