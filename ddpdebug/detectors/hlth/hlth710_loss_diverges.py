"""HLTH710: the loss diverges."""

from __future__ import annotations

import math
import statistics

from ddpdebug.detectors.hlth.curve import LossRule, Series, Shape, losses, sample_noise
from ddpdebug.detectors.hlth.samples import update_ratio
from ddpdebug.detectors.kinds import Examples, Fields, Finding, Findings, Severity, Step, Threshold


class LossDiverges(LossRule):
    """The loss has left its earlier level upwards and keeps rising, without recovery over the window.

    A rise by less than two orders of magnitude may be a target that moves and is a `warning`. So is a loss that had
    come down during a warm-up and lost most of that again as the learning rate rose on, or soon after.

    Impact: the weights get worse with every step; checkpoints written since then are of no use.

    Diagnosis: find the first quantity that moved: learning rate, gradient norm, weight or logit norm, one rank's
    loss, data. Order them by step. If ranks disagree (RANK101, SYNC201), diverging replicas are the likelier story.

    Causes:
    - learning rate too high for this batch size, or scaled twice for the number of ranks; a warm-up that ends too early
    - gradients not cleared, not averaged, or clipped wrongly (RCP808, RCP809, RCP813)
    - numerics: float16 overflow, an eps that is too small, a loss without protection near 0
    - a wrong sign, a loss term without lower bound, an adversarial pair out of balance
    - a resume that lost optimizer state or changed the data order

    Remedy:
    - return to a checkpoint from before the loss rose, lower the peak rate by a factor of 2 to 10, clip to the median
      norm of the steps before
    - if it diverges at the same step again, look at the batch; if at another step, at the rate
    """

    code = "HLTH710"
    severity = Severity.ERROR
    title = "the loss diverges"
    diverged_doubling = Threshold(
        2,
        "growth of the loss between stretches of `diverged_steps` that is an explosion",
        source="gradient descent beyond its stable rate grows geometrically",
    )
    diverged_explosion = Threshold(
        100,
        "multiple of the first level that makes a divergence an `error`",
        source="gradient descent beyond its stable rate grows geometrically; a moving target does not",
    )
    diverged_factor = Threshold(
        3,
        "rise of the loss over its best level, as a multiple of all progress and of that level's noise",
        source="1 is a loss that is back where it began, as after a warm restart",
    )
    diverged_falling = Threshold(
        0.9,
        "second half of the newest losses over the first, below which they recover",
        source="a spike that recovers is HLTH708",
    )
    diverged_first = Threshold(
        0.5,
        "rise of the loss over its first level, as a share of that level",
        source="a loss that ends near where it began is a restart",
    )
    diverged_floor = Threshold(
        0.1,
        "least progress for a rise, as a share of the best level",
        source="chosen: a loss that has hardly fallen would make every rise a multiple of it",
    )
    diverged_recent = Threshold(
        0.5,
        "share of the rise that the newest `diverged_steps` steps brought",
        source="a moving target takes the loss along slowly; what breaks does it at once, or faster and faster",
    )
    diverged_steps = Threshold(
        8, "steps in a row that must lie above the earlier level", source="spikes recover within less"
    )
    diverged_update = Threshold(
        0.05,
        "update norm / weight norm from which on an uncertain divergence is reported",
        source="50 times the 1e-3 of Karpathy's CS231n notes; a loss that follows a moving target rises at any rate",
    )
    lost_progress = Threshold(
        0.5,
        "share of the first level that the loss must have gained, and of that gain that must be lost",
        source="chosen: at the height of a healthy warm-up the loss falls more slowly, or rises by a little",
    )
    lost_warm_up = Threshold(
        3,
        "lengths of the warm-up within which it is blamed for a lost gain",
        source="chosen: the rate is highest at the end of a warm-up, and instability takes some steps to grow",
    )
    fires_on = Examples(
        lambda: losses(
            40,
            lambda i: 2.0 - 0.05 * i + 0.05 * sample_noise(i) if i < 20 else 1.5 * 1.3 ** (i - 20),
            param_norm=1.0,
            update_norm=0.2,
        ),
        lambda: losses(40, lambda i: 1.0 * 1.5**i),
        lambda: losses(20, lambda i: 4000.0 - 90.0 * i if i else 3.7, param_norm=1.0, update_norm=0.5),
        lambda: losses(
            70,
            lambda i: 3.0 - 0.1 * i if i < 25 else 2.6 + 0.8 * sample_noise(i),
            lr=lambda i: 0.01 * min(i + 1, 50),  # a warm-up
            param_norm=1.0,
            update_norm=0.2,
        ),
    )
    silent_on = Examples(
        lambda: losses(60, lambda i: 2.0 - 0.03 * i + (5.0 if i == 30 else 0.0)),  # a spike
        lambda: losses(90, lambda i: 0.7 + 0.01 * i + 0.1 * sample_noise(i)),  # a generator whose opponent learns
        lambda: losses(90, lambda i: 2.0 - 0.02 * (i % 45) + 0.02 * sample_noise(i)),  # warm restarts
        lambda: losses(60, lambda i: 0.5 * sample_noise(i)),  # a policy gradient
        lambda: losses(20, lambda i: 0.4 if i else 1e-7, param_norm=1.0, update_norm=0.01),  # a copy of its teacher
        lambda: losses(60, lambda i: 0.1 + (i / 40) ** 2, param_norm=1.0, update_norm=0.01),  # returns that grow
        lambda: losses(60, lambda i: 3.0 * 0.9**i if i < 30 else 0.4),
        # a new task after the warm-up, as hard as the first
        lambda: losses(
            80, lambda i: 3.0 * 0.9 ** (i % 40), lr=lambda i: 0.01 * min(i + 1, 20), param_norm=1.0, update_norm=0.2
        ),
        lambda: losses(  # a bump at the height of the warm-up
            80,
            lambda i: 3.0 - 0.1 * i if i < 25 else 0.5 + (0.8 if i < 34 else 0.0),
            lr=lambda i: 0.01 * min(i + 1, 50),
            param_norm=1.0,
            update_norm=0.2,
        ),
        lambda: losses(  # the learning rate falls, and rises for a warm restart
            80,
            lambda i: 3.0 - 0.1 * i if i < 25 else 2.6 + 0.8 * sample_noise(i),
            lr=lambda i: 0.1 * (25 - i) if i < 25 else 2.5,
            param_norm=1.0,
            update_norm=0.2,
        ),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._ratio: dict[int, float] = {}
        self._highest: dict[int, tuple[float, float]] = {}  # optimizer -> best level, highest ratio since then

    def judge(self, step: Step, series: Series) -> Findings:
        if (ratio := update_ratio(step)) is not None:
            self._ratio[step.optimizer] = max(ratio, 0.5 * self._ratio.get(step.optimizer, 0.0))
            best, highest = self._highest.get(step.optimizer, (series.best, 0.0))
            self._highest[step.optimizer] = series.best, max(ratio, highest if best == series.best else 0.0)
        count = int(self.diverged_steps)
        if series.count % 2:
            return
        if self._at_once(step, series):
            yield self._exploded(step, series)
            return
        if not self.diverged(series):
            yield from self._lost(step, series)
            return
        values = list(series.losses)
        level = statistics.median(values[-count:])
        reference = max(abs(series.first), abs(series.best))
        unstable = self._ratio.get(step.optimizer, 0.0) >= self.diverged_update
        explodes = unstable or abs(level) > self.diverged_doubling * abs(statistics.median(values[-2 * count : -count]))
        certain = explodes and level >= self.diverged_explosion * reference
        if not (certain or unstable) or not self.once(step, "explosion" if certain else "rise"):
            return
        started = len(values) - 1
        while started > 0 and values[started - 1] > series.best + abs(series.best):
            started -= 1
        yield self.finding(
            step,
            step=series.steps[started],
            subject=("loss",),
            severity=self.severity if certain else Severity.WARNING,
            evidence={
                "best_loss": series.best,
                "loss_now": level,
                "loss_at_first": series.first,
                "curve": str(Shape("diverging", series.steps[started], step.step)),
                "update_over_weight": self._ratio.get(step.optimizer),
                "newest": [f"step {at}: {v:.4g}" for at, v in zip(series.steps, values, strict=True)][-count:],
            },
        )

    def _at_once(self, step: Step, series: Series) -> bool:
        """Whether the loss is far above its very first value since the first step: the first level lies behind that."""
        if series.count != 2 * int(self.diverged_steps) or len(series.losses) < series.count:
            return False
        first, *rest = series.losses
        unstable = self._ratio.get(step.optimizer, 0.0) >= self.diverged_update
        return unstable and 0 < self.diverged_explosion * first <= min(rest) and self.once(step, "explosion")

    def _exploded(self, step: Step, series: Series) -> Finding:
        first, *rest = series.losses
        return self.finding(
            step,
            step=series.steps[0],
            subject=("loss",),
            title="the first step makes the loss explode",
            evidence={
                "first_loss": first,
                "loss_now": statistics.median(rest[-int(self.diverged_steps) :]),
                "lowest_since": min(rest),
                "update_over_weight": self._ratio.get(step.optimizer),
            },
        )

    def diverged(self, series: Series) -> bool:
        """Whether the newest losses have left the earlier level upwards and stay away."""
        losses, count = list(series.losses), int(self.diverged_steps)
        if len(losses) < 2 * count or not math.isfinite(series.best):
            return False
        last = losses[-count:]
        first, best = series.first, series.best
        scale = max(first - best, series.best_spread, self.diverged_floor * abs(best), 1e-12)
        halves = statistics.median(last[: count // 2]), statistics.median(last[count // 2 :])
        lowest, rise = min(last), statistics.median(last) - best
        recent = rise - (statistics.median(losses[-2 * count : -count]) - best)
        far = (
            lowest > best + self.diverged_factor * scale
            and lowest > best + abs(best)
            and lowest > first + self.diverged_first * abs(first)
        )
        # a target that moves takes the loss along slowly; what breaks does it at once, or faster and faster
        return far and halves[1] >= self.diverged_falling * halves[0] and recent > self.diverged_recent * rise

    def lost(self, series: Series) -> bool:
        """Whether what the loss had gained during a warm-up is lost again, while the rate rises or soon after."""
        half = int(self.diverged_steps)
        warm = series.rates[-1] > series.restart * series.best_rate or series.count < self.lost_warm_up * series.risen
        if len(series.losses) < 2 * half or not warm or series.again:
            return False
        gained = series.first - series.best
        if gained < self.lost_progress * abs(series.first):
            return False
        last = series.last(2 * half)
        earlier, later = statistics.median(last[:half]), statistics.median(last[half:])
        away = min(earlier, later) > series.best + self.lost_progress * gained
        return away and later >= self.diverged_falling * earlier

    def _lost(self, step: Step, series: Series) -> Findings:
        """Judge a loss that came down while the learning rate was low, and went up again with it."""
        _, highest = self._highest.get(step.optimizer, (series.best, 0.0))
        unstable = highest >= self.diverged_update
        told = any(optimizer == step.optimizer for optimizer, _ in self.told)
        if not unstable or told or not self.lost(series) or not self.once(step, "lost"):
            return
        count = 2 * int(self.diverged_steps)
        newest = list(zip(series.steps, series.losses, strict=True))[-count:]
        yield self.finding(
            step,
            step=newest[0][0],
            subject=("loss",),
            severity=Severity.WARNING,
            evidence={
                "best_loss": series.best,
                "loss_now": statistics.median(loss for _, loss in newest),
                "loss_at_first": series.first,
                "curve": str(Shape("unstable", newest[0][0], step.step)),
                "learning_rate": series.rates[-1],
                "learning_rate_of_best_loss": series.best_rate,
                "update_over_weight": highest,
                "newest": [f"step {at}: {loss:.4g}" for at, loss in newest],
            },
        )
