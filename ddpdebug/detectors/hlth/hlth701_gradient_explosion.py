"""HLTH701: gradients explode."""

from __future__ import annotations

import math
import statistics
from collections import deque
from itertools import pairwise

from ddpdebug.detectors.hlth.curve import followed, losses, sample_noise
from ddpdebug.detectors.kinds import Detector, Examples, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.schema.row import Flag

_NO_NORM = Flag.SKIPPED | Flag.GRADS_NONFINITE
#: Norms that are remembered.
_KEPT = 37


class GradientExplosion(Detector):
    """The gradient norm is far above its own recent history, or grows geometrically over the window.

    Impact: single updates throw the weights away from what was learned; what follows is a loss spike, divergence or
    overflow.

    Diagnosis: look at the norm per layer: growth towards the input is depth, one layer alone is local, all layers at
    once is the loss or the batch. Compare the ranks: one rank alone points to its batch. Check the norm before
    clipping, the learning rate at that step, and weight and logit norms (HLTH706).

    Causes:
    - learning rate too high, or a warm-up that is missing or too short
    - an outlier batch: corrupt sample, huge target, a tiny denominator in the loss
    - no normalisation or bad initialisation in a deep or recurrent model
    - a sum where a mean was meant, over tokens, micro-batches or loss terms
    - Adam's second moment too slow for the change (beta2=0.999 with noisy gradients)

    Remedy:
    - clip with `torch.nn.utils.clip_grad_norm_(params, 1.0)` and log the returned norm
    - warm up over hundreds to thousands of steps, lower the peak rate, try `betas=(0.9, 0.95)`
    - normalise the loss by its number of elements
    - scale residual branches at initialisation, use pre-norm
    - if one batch did it, look at the batch
    """

    code = "HLTH701"
    severity = Severity.WARNING
    title = "gradients explode"
    reads = ("grad_norm",)
    gradient_growth = Threshold(
        1000,
        "growth of the gradient norm over `gradient_growth_steps`, as a multiple",
        source="11 rises of a factor of 1.9 each: geometric, long before float32 overflows",
    )
    gradient_growth_steps = Threshold(
        12, "steps that are judged together for geometric growth", source="see `gradient_rises`"
    )
    gradient_jump = Threshold(
        20,
        "gradient norm as a multiple of the median of its history",
        source="largest seen in healthy scripts of the corpus: 5.8",
    )
    gradient_newest = Threshold(
        5,
        "newest steps, of which `gradient_steps` must be high; not part of the median",
        source="a jump must not become its own history",
    )
    gradient_rises = Threshold(
        10, "rises from step to step among the `gradient_growth_steps`", source="10 or 11 heads of 11 coins: 0.6 %"
    )
    gradient_steps = Threshold(
        3,
        "steps out of the last five whose norm must be that far up",
        source="one outlier alone is a batch; clipping is made for it (Pascanu, Mikolov, Bengio 2013)",
    )
    gradient_warm_up = Threshold(
        12, "steps with a known norm before any is judged", source="leaves 7 for the median beside the 5 newest"
    )
    fires_on = Examples(
        lambda: losses(40, lambda i: 1.0, grad_norm=lambda i: 1.0 + 0.3 * sample_noise(i) if i < 30 else 60.0),
        lambda: losses(20, lambda i: 1.0, grad_norm=lambda i: 0.5 * 2.5**i),
    )
    silent_on = Examples(
        lambda: losses(20, lambda i: 2.0 - 0.05 * i, grad_norm=lambda i: 0.002 * i),  # behind a layer that began at 0
        lambda: losses(
            60, lambda i: 1.0, grad_norm=lambda i: 90.0 if i == 40 else 1.0 + 0.5 * sample_noise(i)
        ),  # one batch
        lambda: losses(
            60, lambda i: 1.0, grad_norm=lambda i: 1.0 if i % 5 < 2 else 90.0, loss_kind=lambda i: 1 + (i % 5 < 2)
        ),  # another loss in three of five steps
        lambda: losses(60, lambda i: 1.0, grad_norm=lambda i: 1.0 + 0.1 * i),  # grows slowly
        lambda: losses(60, lambda i: 1.0, grad_norm=lambda i: math.exp(2 * sample_noise(i))),  # heavy tails
        lambda: losses(
            60, lambda i: 1.0, grad_norm=lambda i: 1.0 + 0.1 * (i % 3), loss_scale=lambda i: 2.0 ** (10 + i // 12)
        ),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._norms: dict[int, deque[tuple[int, float, float]]] = {}  # (step, norm, loss)
        self._told: set[tuple[int, str]] = set()

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        return cause.code != "HLTH705" or cause.phase == "large"

    def can_show(self, step: Step) -> bool:
        return False

    def detect(self, step: Step) -> Findings:
        norm, kind = _norm(step), followed(step, self.shared)
        if kind.anew:
            self._norms.pop(step.optimizer, None)
        if norm is None or not kind.loss:
            return
        past = self._norms.setdefault(step.optimizer, deque(maxlen=_KEPT))
        losses = [row.loss for row in step.rows.values()]
        past.append((step.step, norm, statistics.fmean(losses)))
        if len(past) < self.gradient_warm_up:
            return
        values = [value for _, value, _ in past]
        jump = self.gradient_jump
        if norm <= jump * min(values):
            return
        newest = int(self.gradient_newest)
        usual = statistics.median(values[:-newest] or values)
        high = [at for at, value, _ in list(past)[-newest:] if value > jump * usual]
        growing = list(past)[-int(self.gradient_growth_steps) :]
        rises = sum(after > before for (_, before, _), (_, after, _) in pairwise(growing))
        begun, now = ([loss for *_, loss in part] for part in (growing[:newest], growing[-newest:]))
        opens = statistics.fmean(now) < statistics.fmean(begun)  # a branch that began at zero, and the loss falls
        phase, since = None, growing[0][0]
        if rises >= self.gradient_rises and norm > self.gradient_growth * growing[0][1] and not opens:
            phase = "growth"
        elif usual > 0 and len(high) >= self.gradient_steps:
            phase, since = "jump", high[0]
        if phase is not None and not any((step.optimizer, p) in self._told for p in ("growth", "jump")):
            self._told.add((step.optimizer, phase))
            yield self.finding(
                step,
                step=since,
                subject=("gradients",),
                phase=phase,
                evidence={
                    "norm": norm,
                    "median_before": usual,
                    "newest": [f"step {a}: {v:.4g}" for a, v, _ in past][-8:],
                },
            )


def _norm(step: Step) -> float | None:
    """Return the norm of the reduced gradients."""
    if step.any(_NO_NORM):
        return None
    row = next(iter(step.rows.values()))
    return row.grad_norm if math.isfinite(row.grad_norm) else None
