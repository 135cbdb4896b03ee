"""HLTH709: the loss is flat from the start, or has reached a plateau."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ddpdebug.detectors import causality
from ddpdebug.detectors.hlth.curve import Evaluation, LossRule, Series, Shape, losses, noise, sample_noise, trend
from ddpdebug.detectors.hlth.hlth705_update_ratio import UpdateRatio
from ddpdebug.detectors.hlth.samples import update_ratio
from ddpdebug.detectors.kinds import Examples, Facts, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.schema.robust import MEDIAN_ERROR

#: The series is judged every so many steps.
_EVERY = 8
#: What is an `info`, in the words of a curve.
_INFO = {"plateau": "plateau", "underfitting": "underfitting (a hint)"}


_MOVES = {"param_norm": 4.0, "update_norm": 0.01}


def _chance(level: float, **fields: Any) -> Facts:
    """Return what two ranks tell of their targets."""
    told = {"loss": "NllLoss", "reads": 16, "seen": 512, "chance": level, **fields}
    return Facts(topic="targets", values=dict.fromkeys(range(2), told))


def _game(optimizer: int) -> tuple[Step, ...]:
    return losses(104, lambda i: 0.7 + 0.02 * sample_noise(i * i), optimizer=optimizer, **_MOVES)


_UNDONE = (
    "copies of the weights from before they were loaded, which the step wrote back: the optimizer's master weights",
    "a learning rate for training from the start, without a warm-up",
    "an optimizer state of another model or another order of parameters",
)


_KEEP = (
    "load the weights before the optimizer is built, or have it copy its master weights anew after that",
    "compare a parameter with what was loaded, before and after the first step",
    "lower the learning rate, or warm it up",
)


class LossFlat(LossRule):
    """Over the window the loss shows no trend that stands out from its noise: since the first step, or after it fell.

    Where the targets are known, a loss is also told that stays at chance (phase `chance`): at what a model loses that
    knows how frequent the classes are (in a regression, the mean of the targets) and nothing of the inputs, although
    the weights have moved. Where the first loss was well below chance and those after one step are at it, that step has
    undone what was learned (phase `undone`): an `error`. Where several optimizers step, or the targets never change,
    nothing is said of chance.

    A plateau after the loss fell is an `info`. Where validation losses are told, a plateau on which training and
    validation loss are both stuck, high and close together is said to hint at underfitting: also an `info`, and under
    this code because it is a plateau with a likely reason. Noise in the labels looks the same.

    Impact: the run consumes time without learning.

    Diagnosis: flat from the start: compare the value with log C (RCP801). At log C the model predicts uniformly, so
    look whether anything changes: learning rate (RCP807), gradients (HLTH714), parameters (HLTH713), train mode,
    optimizer contents (RCP803). Try to overfit one batch. A plateau: look at the schedule, at gradient noise, and at
    validation loss; it may simply be the end.

    Causes:
    - at chance while weights move: labels without relation to the inputs
    - learning rate 0, far too low, or so high that the model jumped into a flat region at once
    - the optimizer does not hold the model's parameters, or the loss is detached from them
    - labels that do not belong to the inputs: shuffled apart, wrong file, off by one
    - constant outputs: dead units, saturation, inputs that are all alike
    - a plateau: the rate is too high to go lower, or the model has reached its capacity
    - a hint at underfitting: the model is too small, regularised too much, or its inputs lack what decides

    Remedy:
    - overfit a single batch with regularisation off: where that works look at data and schedule, where it does not at
      model, loss and optimizer
    - sweep the learning rate over decades
    - follow RCP801, RCP803, RCP807 and RCP810 before touching the architecture
    - on a hint at underfitting take a larger model, less decay and dropout, or more informative inputs; look first at
      what a single batch can be fitted to
    - on a plateau lower the rate, and see whether the loss moves within a few hundred steps
    """

    code = "HLTH709"
    severity = Severity.WARNING
    title = "the loss is flat from the start, or has reached a plateau"
    update_small = UpdateRatio.update_small
    chance_above = Threshold(
        0.15,
        "distance above chance, as a share of it, that is still chance",
        source="chosen: a rate on the high side costs as much; above it something else is wrong",
    )
    chance_below = Threshold(
        0.005,
        "distance below chance, as a share of it, that is not at chance",
        source="chosen: at log 10 it is 0.012, a fiftieth of what easy tasks have learned by then",
    )
    chance_moved = Threshold(
        0.1,
        "sum of the updates as a share of the weights of a model that has moved",
        source="chosen: a hundred updates of a thousandth each, the usual size of one",
    )
    chance_steps = Threshold(
        96,
        "steps at chance, since the learning rate has risen, until a report, of which half at least were watched",
        source="chosen: healthy classifiers of the corpus have left it after 30",
    )
    flat_certain = Threshold(
        0.005,
        "change as a share of the level, below which there is never a trend",
        source="a quarter of `flat_change`",
    )
    flat_change = Threshold(
        0.02,
        "change over the window as a share of the level, below which there is no trend",
        source="chosen: at the log 10 of an uninformed classifier that is 0.05",
    )
    flat_constant = Threshold(
        1e-05,
        "relative spread of a loss that stays although the batches change",
        source="Amazon SageMaker Debugger's built-in rule UnchangedTensor: rtol 1e-5",
    )
    flat_errors = Threshold(
        2, "standard errors, below which a change is no trend", source="95 % of a normal distribution lie within 1.96"
    )
    flat_noise = Threshold(
        0.25,
        "noise from step to step, above which the level means nothing",
        source="policy gradients: their loss is no measure of progress",
    )
    flat_steps = Threshold(
        200,
        "steps without a trend after which a loss is flat from the start",
        source="in so many steps a fall of 3 % stands out of noise of 5 % by 2.7 standard errors",
    )
    flat_steps_still = Threshold(
        32,
        "the same where the weights hardly move (see `update_small`) or the loss is constant",
        source="longer than a warm-up that begins at 0 takes to move the weights",
    )
    plateau_done = Threshold(
        0.05,
        "level as a share of the first one, below which nothing is left to learn",
        source="chosen: 95 % of the way; no figure to cite",
    )
    plateau_fallen = Threshold(
        0.95,
        "level as a share of the first one of a loss that has fallen",
        source="a fall of less than 5 % is still flat from the start",
    )
    plateau_steps = Threshold(
        300,
        "steps without a trend, after the loss fell, that are a plateau (`info`)",
        source="schedules plateau for shorter times between their drops",
    )
    shape_errors = Threshold(
        3,
        "standard errors below which the whole curve has no trend (`report`)",
        source="99.7 % of a normal distribution lie within 3",
    )
    shape_steps = Threshold(
        16,
        "losses, below which a curve has no shape (`report`)",
        source="thirds of five: their medians forget two outliers",
    )
    undone_errors = Threshold(
        8, "times the noise of the later losses by which the first one is lower", source="chosen: no single easy batch"
    )
    undone_level = Threshold(
        0.7, "first loss as a share of chance, below which a model knows something", source="chosen: well below noise"
    )
    undone_steps = Threshold(8, "losses after the first step that are at chance", source="as `diverged_steps`")
    underfit_evaluations = Threshold(
        3, "evaluations on the plateau that must be there", source="as `overfit_evaluations`"
    )
    underfit_gap = Threshold(
        0.1,
        "difference of validation and training loss, relative, below which they are close",
        source="chosen: twice the generalisation loss of 5 % of Prechelt 1998",
    )
    underfit_level = Threshold(
        0.5,
        "level of the plateau as a share of the first one that is high",
        source="chosen: half of the first loss is still there; no figure to cite, and the noise of the labels may "
        "be as large",
    )
    fires_on = Examples(
        lambda: (_chance(2.3), *losses(104, lambda i: 2.32 + 0.03 * sample_noise(i * i), **_MOVES)),
        lambda: (_chance(1.0), *losses(104, lambda i: 1.03 + 0.8 * 0.8**i + 0.05 * sample_noise(i * i), **_MOVES)),
        lambda: (  # of which two in three are watched
            _chance(2.3),
            *(one for one in losses(128, lambda i: 2.32 + 0.03 * sample_noise(i * i), **_MOVES) if one.step % 3),
        ),
        lambda: (_chance(2.3), *losses(24, lambda i: 2.3 + 0.05 * sample_noise(i * i) if i else 0.9, **_MOVES)),
        lambda: losses(48, lambda i: 2.302585),
        lambda: losses(240, lambda i: 2.3 + 0.05 * sample_noise(i)),
        lambda: losses(48, lambda i: 2.3 + 0.05 * sample_noise(i), param_norm=4.0, update_norm=1e-6),
        lambda: losses(
            640,
            lambda i: 1.4 + 0.9 * 0.95**i + 0.02 * sample_noise(i),  # a hint at underfitting
            val_loss=lambda i: 1.42 + 0.9 * 0.95**i if i % 50 == 49 else math.nan,
        ),
    )
    silent_on = Examples(
        lambda: (
            _chance(2.3),
            *losses(104, lambda i: 2.25 + 0.03 * sample_noise(i * i), **_MOVES),
        ),  # has learned a little
        lambda: (_chance(2.3), *losses(104, lambda i: 2.32 - 0.001 * i, **_MOVES)),  # begins to learn
        lambda: (_chance(2.3), *losses(104, lambda i: 2.31, lr=lambda i: 1e-4 * i, **_MOVES)),  # a warm-up
        lambda: (_chance(2.3), *losses(24, lambda i: 1.5 + 0.3 * sample_noise(i * i) if i else 0.9, **_MOVES)),
        lambda: (_chance(2.3), *losses(80, lambda i: 2.32 + 0.03 * sample_noise(i * i), **_MOVES)),
        lambda: (  # of which too few are watched
            _chance(2.3),
            *(one for one in losses(160, lambda i: 2.32 + 0.03 * sample_noise(i * i), **_MOVES) if one.step % 4 == 0),
        ),
        lambda: (
            _chance(2.3),
            *losses(104, lambda i: 2.32 + 0.03 * sample_noise(i * i)),
        ),  # whether it moves is not known
        lambda: (_chance(0.69, fixed=True), *losses(104, lambda i: 0.7 + 0.02 * sample_noise(i * i), **_MOVES)),
        lambda: tuple(  # a game of two
            step
            for i, pair in enumerate(zip(_game(0), _game(1), strict=True))
            for step in (*([_chance(0.69)] * (not i)), *pair)
        ),
        lambda: losses(120, lambda i: 2.3 + 0.05 * sample_noise(i)),  # may still begin to learn
        lambda: losses(
            300, lambda i: 1.0 + 0.7 * 0.8**i + 0.05 * sample_noise(i)
        ),  # fell at once: a plateau, when it lasts
        lambda: losses(400, lambda i: 2.3 - 0.001 * i + 0.05 * sample_noise(i)),
        lambda: losses(400, lambda i: 0.1 + sample_noise(i)),  # a policy gradient
        lambda: losses(400, lambda i: 2.0 * 0.9**i + 0.01 + 0.002 * sample_noise(i)),  # it has learned
        lambda: losses(48, lambda i: 2.3, batch_digest=7),  # the same batch again and again
        lambda: losses(
            48, lambda i: 2.3 + 0.05 * sample_noise(i), param_norm=4.0, update_norm=1e-6, lr=lambda i: 1e-6 * i
        ),
    )

    topics = ("alone", "targets")

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._chance: float | None = None  # the loss of the best constant answer
        self._way: dict[int, list[float]] = {}  # optimizer -> ratios of update to weight, sampled
        self._next: dict[int, int] = {}  # optimizer -> step from which on it is judged again
        self._moved: dict[int, float] = {}  # optimizer -> largest ratio of update to weight
        self._batches: dict[int, set[int]] = {}

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        return cause.code in causality.group("broken") or finding.phase not in _INFO

    def compare(self, topic: str, facts: Mapping[int, Any]) -> Findings:
        yield from super().compare(topic, facts)
        if topic == "targets":
            levels = [fact.chance for fact in facts.values()]
            known = all(
                level is not None and not fact.fixed for level, fact in zip(levels, facts.values(), strict=True)
            )
            self._chance = math.fsum(levels) / len(levels) if known and levels else None

    def judge(self, step: Step, series: Series) -> Findings:
        key = step.optimizer
        if (ratio := update_ratio(step)) is not None:
            self._moved[key] = max(self._moved.get(key, 0.0), ratio)
            self._way.setdefault(key, []).append(ratio)
        seen = self._batches.setdefault(key, set())
        if len(seen) < 2:
            seen.add(next(iter(step.rows.values())).batch_digest)
        self.evaluated(step, series)
        if step.step < self._next.get(key, _EVERY - 1):
            return
        self._next[key] = step.step + _EVERY
        if self._undone(series) and self.once(step, "undone"):
            self.once(step, "flat")  # that is why it is at chance
            yield self._told_undone(step, series)
        if self._at_chance(key, series) and self.once(step, "flat"):
            yield self._told_chance(step, series)
            return
        phase = self._phase(key, series, len(seen) > 1)
        if phase is None or not self.once(step, "flat" if phase == "still" else phase):
            return
        values = list(series.losses)
        known = phase in _INFO
        since = series.steps[-int(self.plateau_steps)] if known else series.steps[0]
        evidence: dict[str, Any] = {
            "loss": statistics.median(values[-16:]),
            "loss_at_first": series.first,
            "curve": str(Shape(_INFO.get(phase, "flat"), since, step.step)),
            "steps": len(values),
            "largest_update_over_weight": self._moved.get(key),
        }
        if phase == "underfitting":
            evidence["validation_loss"] = self.history[key][-1].validation
        title = {"title": "training and validation loss are stuck, high and close together: a hint at underfitting"}
        yield self.finding(
            step=since,
            last_step=step.step,
            ranks=tuple(sorted(step.everyone)),
            subject=("loss",),
            phase=phase,
            severity=Severity.INFO if known else self.severity,
            evidence=evidence,
            **(title if phase == "underfitting" else {}),
        )

    def _at_chance(self, key: int, series: Series) -> bool:
        """Whether the newest losses are those of a model that has learned nothing of its inputs, although it has moved.

        A loss that is below, be it by little, or has been by more than its noise, has learned; so has one that still
        falls.
        """
        steps = int(self.chance_steps)
        few = series.span < steps or series.count < steps // 2
        if not self._chance or len(self.series) > 1 or few or series.restarted(steps):
            return False
        values = series.last(steps // 2)
        level, scatter = statistics.median(values), MEDIAN_ERROR * noise(values)
        error = scatter / math.sqrt(len(values))
        lowest = min(level, series.best) + self.shape_errors * scatter / math.sqrt(self.level_steps)
        below = max(self.chance_below * self._chance, self.flat_errors * error)
        change, errors = trend(values)
        way = self._way.get(key)
        moved = statistics.fmean(way) * series.span >= self.chance_moved if way else False
        stands = -change < self.flat_change * level or abs(errors) < self.shape_errors
        near = level <= (1 + self.chance_above) * self._chance
        return moved and stands and near and level > self._chance - below and lowest > self._chance

    def _undone(self, series: Series) -> bool:
        """Whether the model knew something of its inputs before the first step, and nothing after it."""
        first, *later = series.head(1 + int(self.undone_steps)) or [math.nan]
        if not self._chance or len(self.series) > 1 or len(later) < self.undone_steps or series.steps[1] != 1:
            return False
        apart = statistics.median(later) - first > self.undone_errors * noise(later)
        return (
            first < self.undone_level * self._chance and min(later) > (1 - self.chance_above) * self._chance and apart
        )

    def _told_undone(self, step: Step, series: Series) -> Finding:
        return self.finding(
            step=0,
            last_step=step.step,
            ranks=tuple(sorted(step.everyone)),
            subject=("loss",),
            phase="undone",
            severity=Severity.ERROR,
            title="the first step has undone what the model had learned: its loss is at chance since",
            evidence={
                "first_loss": series.losses[0],
                "second_loss": series.losses[1],
                "chance": self._chance,
            },
            causes=_UNDONE,
            actions=_KEEP,
        )

    def _told_chance(self, step: Step, series: Series) -> Finding:
        chance = self._chance or math.nan
        return self.finding(
            step=series.steps[0],
            last_step=step.step,
            ranks=tuple(sorted(step.everyone)),
            subject=("loss",),
            phase="chance",
            title="the loss stays at chance: the model has learned nothing of the inputs",
            evidence={
                "loss": statistics.median(series.last(int(self.chance_steps) // 2)),
                "loss_at_chance": chance,
                "curve": str(Shape("at chance", series.steps[0], step.step)),
                "steps": series.span,
                "weights_moved_by": statistics.fmean(self._way[step.optimizer]) * series.span,
            },
        )

    def _phase(self, key: int, series: Series, batches_differ: bool) -> str | None:  # noqa: FBT001 - one caller
        values = list(series.losses)
        level = abs(statistics.median(values)) or 1e-12
        if series.count > len(values) or series.restarted(len(values)):
            return None if series.count <= len(values) else self._plateau(key, series, values)
        still_steps = self.flat_steps_still
        constant = max(values) - min(values) <= self.flat_constant * level
        if series.count >= still_steps and constant and batches_differ and level > 1e-9:
            return "still"
        change, errors = trend(values)
        quiet = noise(values) < self.flat_noise * level
        flat = self._still(change, errors, level) and quiet and not self.fell(series.first, values)
        still = key in self._moved and self._moved[key] < self.update_small
        if flat and series.count >= (still_steps if still else self.flat_steps):
            return "still" if still else "flat"
        return self._plateau(key, series, values)

    def _still(self, change: float, errors: float, level: float) -> bool:
        """Whether a change of the window is no fall that stands out."""
        return change > -self.flat_change * level and abs(errors) < self.flat_errors

    def _plateau(self, key: int, series: Series, values: list[float]) -> str | None:
        steps = int(self.plateau_steps)
        fallen = series.best < self.plateau_fallen * series.first
        if len(values) < steps or series.count < 2 * steps or not fallen:
            return None
        change, errors = trend(values[-steps:])
        level = abs(statistics.median(values[-steps:]))
        moves = abs(errors) >= self.flat_errors or abs(change) >= self.flat_change * level
        if moves or level < self.plateau_done * abs(series.first):
            return None
        begin = series.steps[-steps]
        history = [evaluation for evaluation in self.history.get(key, ()) if evaluation.step >= begin]
        return "underfitting" if self.underfits(history, level, series.first) else "plateau"

    def fell(self, first: float, losses: Sequence[float]) -> bool:
        """Whether a loss that is flat now lies below its first level, further than by chance: it fell at once."""
        level = statistics.median(losses[-max(1, len(losses) // 3) :])
        error = MEDIAN_ERROR * noise(losses) / math.sqrt(self.level_steps)
        least = max((1 - self.plateau_fallen) * abs(first), self.shape_errors * error)
        return first - level > least

    def is_flat(self, change: float, errors: float, level: float) -> bool:
        uncertain = abs(errors) < self.shape_errors or abs(change) < self.flat_certain * level
        return uncertain and abs(change) < self.flat_change * level

    def underfits(self, history: Sequence[Evaluation], level: float, first: float) -> bool:
        """Whether training and validation loss of a plateau are stuck, high and close together."""
        if len(history) < self.underfit_evaluations or level < self.underfit_level * abs(first):
            return False
        half = len(history) // 2
        values = [evaluation.validation for evaluation in history]
        stuck = statistics.median(values[:half]) - statistics.median(values[-half:]) < self.flat_change * level
        gap = abs(statistics.median(values) - statistics.median(evaluation.training for evaluation in history))
        return stuck and gap < self.underfit_gap * level
