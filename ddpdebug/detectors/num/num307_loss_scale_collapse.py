"""NUM307: the gradient scaler skips too often, or has no scale left."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ddpdebug.detectors.examples import step_at
from ddpdebug.detectors.kinds import Detector, Examples, Fields, Findings, Severity, Step, Threshold
from ddpdebug.schema.row import Flag

_MAX_HISTORY = 16


@dataclass(slots=True)
class _Past:
    settled: bool = False
    since: int = 0  # first of the steps in a row that were skipped
    skips: deque[bool] = field(default_factory=deque)
    highest: float = 0.0
    scales: list[tuple[int, float]] = field(default_factory=list)  # where it changed


class LossScaleCollapse(Detector):
    """Steps are skipped far more often than a dynamic loss scale needs, or the scale has fallen to next to nothing.

    A few skips at the start and one now and then are how the scale is found: more than 30 % of 50 steps are too many,
    and so is a scale of 1 that still overflows.

    Impact: skipped steps train nothing while schedules and counters go on; at a scale near or below 1 small gradients
    round to 0 in float16, and a scale that keeps halving means that every gradient is non-finite.

    Diagnosis: plot `scaler.get_scale()` over steps. A straight fall by halves means that something is non-finite
    whatever the scale is: look for NUM301 and NUM303. A saw-tooth with frequent teeth means that gradients live near
    the upper end. Skips are no calls of `optimizer.step`, so count them as steps in which the scale went down.

    Causes:
    - `skips`: a short `growth_interval`, so that the scale is pushed over the edge again and again
    - `collapsed`: a real nan or inf in forward or backward that no scale can cure
    - activations that overflow float16 by themselves, often a model pretrained in bfloat16
    - gradients that explode: learning rate too high, no clipping, a loss summed over many tokens

    Remedy:
    - `skips`: raise `growth_interval` (2000 is torch's own)
    - `collapsed`: find the non-finite value first; a lower scale only hides it
    - then prefer bfloat16, which needs no scaler
    - keep sensitive modules in float32, average the loss, warm the learning rate up, clip after
      `scaler.unscale_(optimizer)`, and step the scheduler only when the scale did not fall
    """

    code = "NUM307"
    severity = Severity.WARNING
    title = "the loss scaler skips too many steps or has collapsed"
    titles: ClassVar[Mapping[str, str]] = {
        "collapsed": "the loss scale has collapsed",
        "skips": "the loss scaler skips too many steps",
    }
    reads = ("loss_scale",)
    incident = ()
    scale_collapsed = Threshold(
        1, "loss scale at which float16 gradients have nothing left to gain", source="1 is no scale at all"
    )
    scale_fall = Threshold(
        1024,
        "fall from the largest scale so far, as a multiple, that is a collapse",
        source="ten halvings in vain; finding the first scale takes fewer",
    )
    scale_skipped = Threshold(
        0.3,
        "share of skipped attempts in the window, above which it is too many",
        source="a scaler that only probes upwards skips one step in thousands, with a growth interval of a few "
        "steps up to every fifth",
    )
    scale_window = Threshold(
        50, "attempts that are judged together, after the first step that was taken", source="chosen: 15 skips of 50"
    )
    fires_on = Examples(
        lambda: tuple(step_at(n, flags=Flag.SKIPPED, loss_scale=65536.0 / 2**n) for n in range(18)),
        lambda: tuple(step_at(n, flags=Flag.SKIPPED if n % 2 else 0, loss_scale=1024.0) for n in range(60)),
    )
    silent_on = Examples(
        lambda: tuple(
            step_at(n, flags=Flag.SKIPPED if n < 9 else 0, loss_scale=65536.0 / 2 ** min(n, 9)) for n in range(70)
        ),
        lambda: tuple(step_at(n, flags=Flag.SKIPPED if n % 5 == 0 else 0, loss_scale=1024.0) for n in range(120)),
        lambda: tuple(step_at(n, loss_scale=1.0) for n in range(60)),
        lambda: tuple(step_at(n, flags=Flag.SKIPPED if 30 <= n < 36 else 0, loss_scale=1024.0) for n in range(90)),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._past: dict[int, _Past] = {}

    def can_show(self, step: Step) -> bool:
        past = self._past.get(step.optimizer)  # once it is below half of the limit, it is over
        return past is None or 2 * sum(past.skips) < self.scale_skipped * self.scale_window

    def detect(self, step: Step) -> Findings:
        scales = [row.loss_scale for row in step.rows.values() if math.isfinite(row.loss_scale)]
        if not scales:
            return
        window = int(self.scale_window)
        past = self._past.setdefault(step.optimizer, _Past(skips=deque(maxlen=window)))
        skipped, scale = step.all(Flag.SKIPPED), min(scales)
        past.highest = max(past.highest, scale)
        if not past.scales or past.scales[-1][1] != scale:
            past.scales = [*past.scales[1 - _MAX_HISTORY :], (step.step, scale)]
        past.settled = past.settled or not skipped
        past.since = past.since if skipped else step.step + 1
        if past.settled:
            past.skips.append(skipped)
        fallen = past.highest >= self.scale_fall * scale
        collapsed = skipped and scale <= self.scale_collapsed and fallen
        often = len(past.skips) == window and sum(past.skips) > self.scale_skipped * window
        if collapsed or often:
            yield self.finding(
                step,
                step=past.since if collapsed else step.step,
                subject=("loss scale",),
                phase="collapsed" if collapsed else "skips",
                evidence={
                    "loss_scale": scale,
                    "skipped": f"{sum(past.skips)} of {len(past.skips)} steps",
                    "history": [f"step {at}: {value:g}" for at, value in past.scales],
                },
            )
