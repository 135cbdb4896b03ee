"""HLTH707: gradient clipping acts on most steps."""

from __future__ import annotations

import math
import statistics
from collections import deque

from ddpdebug.detectors.hlth.curve import losses, sample_noise
from ddpdebug.detectors.kinds import Detector, Examples, Fields, Findings, Severity, Step, Threshold


class ClippingAlways(Detector):
    """The total gradient norm exceeded the clipping threshold in most steps of the window.

    Impact: clipping no longer catches outliers but sets the step length: with SGD the update is a fixed length in the
    gradient's direction, and the learning rate no longer means what it says.

    Diagnosis: log the norm that `clip_grad_norm_` returns and compare its median with `max_norm`. Check whether the
    gradients were unscaled first (RCP813) and divided by the number of micro-batches (RCP809). In the first steps of
    a run constant clipping is common. Adam is nearly invariant to it while it acts evenly, so judge by the loss.

    Causes:
    - a threshold that was copied from another model and lies below the ordinary norm
    - gradients that are too large: a summed loss, missing division under accumulation, scaled gradients
    - training that is unstable by itself (HLTH701)
    - a norm taken over many more parameters than the threshold was chosen for

    Remedy:
    - set `max_norm` to a few times the median norm of healthy steps
    - correct the scale of the loss
    - call `scaler.unscale_(optimizer)` before clipping
    - if the norm is high only early, a longer warm-up is the better tool
    """

    code = "HLTH707"
    severity = Severity.WARNING
    title = "gradient clipping acts on most steps"
    reads = ("clip_norm",)
    clip_ratio = Threshold(
        10,
        "median norm of the window as a multiple of the clipping threshold",
        source="largest seen in healthy scripts of the corpus: 7.6 (an actor-critic)",
    )
    clip_share = Threshold(
        0.9,
        "share of the window's steps whose norm exceeds the clipping threshold",
        source="Pascanu, Mikolov, Bengio 2013 mean clipping for rare large norms",
    )
    clip_window = Threshold(
        32,
        "steps with clipping that are judged together, after a warm-up of half as many",
        source="constant clipping is common in the first steps",
    )
    fires_on = Examples(
        lambda: losses(60, lambda i: 1.0, clip_norm=lambda i: 12 + sample_noise(i), clip_max=1.0),
        lambda: losses(80, lambda i: 1.0, clip_norm=lambda i: 3.0 + sample_noise(i), clip_max=0.1),
    )
    silent_on = Examples(
        lambda: losses(
            80, lambda i: 1.0, clip_norm=lambda i: 2.0 + sample_noise(i), clip_max=1.0
        ),  # acts, but not by much
        lambda: losses(
            80, lambda i: 1.0, clip_norm=lambda i: 20.0 if i < 15 else 0.9 + sample_noise(i), clip_max=1.0
        ),  # warm-up
        lambda: losses(80, lambda i: 1.0, clip_norm=lambda i: 40.0 if i % 3 else 0.5, clip_max=1.0),
        lambda: losses(80, lambda i: 1.0, clip_norm=50.0, clip_max=math.inf),  # only measures
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._past: dict[int, deque[tuple[int, float, float]]] = {}
        self._seen: dict[int, int] = {}
        self._told: set[int] = set()

    def can_show(self, step: Step) -> bool:
        return False

    def detect(self, step: Step) -> Findings:
        pairs = [(row.clip_norm, row.clip_max) for row in step.rows.values()]
        known = [(norm, most) for norm, most in pairs if math.isfinite(norm) and 0 < most < math.inf]
        if not known or step.optimizer in self._told:
            return
        window = int(self.clip_window)
        seen = self._seen[step.optimizer] = self._seen.get(step.optimizer, 0) + 1
        past = self._past.setdefault(step.optimizer, deque(maxlen=window))
        past.append((step.step, statistics.fmean(norm for norm, _ in known), known[0][1]))
        if seen < window + window // 2:
            return
        share = sum(norm > most for _, norm, most in past) / window
        ratio = statistics.median(norm / most for _, norm, most in past)
        if share >= self.clip_share and ratio >= self.clip_ratio:
            self._told.add(step.optimizer)
            yield self.finding(
                step,
                step=past[0][0],
                subject=("gradients",),
                evidence={
                    "clipped": f"{share:.0%} of {window} steps",
                    "median_norm": ratio * past[-1][2],
                    "max_norm": past[-1][2],
                },
            )
