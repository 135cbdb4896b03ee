"""HLTH708: the loss spiked and recovered."""

from __future__ import annotations

import statistics

from ddpdebug.detectors.hlth.curve import LossRule, Series, losses, sample_noise
from ddpdebug.detectors.kinds import Examples, Fields, Findings, Severity, Step, Threshold


class LossSpike(LossRule):
    """The loss rose far above its recent spread for a few steps and came back.

    Impact: usually harmless alone; repeated spikes cost progress and often precede divergence.

    Diagnosis: look at the gradient norm one to three steps before the loss rose: a high norm first means that an
    update did it, a high loss first means that the batch did. Compare ranks: one rank alone is a batch. Look for
    events at that step: epoch border, resumed checkpoint, change of rate, change of data source.

    Causes:
    - an outlier batch: corrupt, repeated, very long or mislabelled samples
    - learning rate near the edge of stability; Adam's second moment too old for the new gradients
    - a resume without optimizer, scheduler or scaler state
    - a change of data: epoch border, next shard, next curriculum stage

    Remedy:
    - inspect the batch of the named step
    - clip gradients, lower beta2 to 0.95 or the peak rate, lengthen warm-up
    - on resume load `optimizer`, `scheduler`, `scaler` and sampler position
    - for repeated spikes restart from an earlier checkpoint and skip the batches around the spike, on all ranks alike
    """

    code = "HLTH708"
    severity = Severity.WARNING
    title = "the loss spiked and recovered"
    spike_before = Threshold(
        20,
        "steps before a spike that say what is usual",
        source="chosen: long enough for a median, short enough for a falling loss",
    )
    spike_height = Threshold(
        3,
        "height of a spike over the median, as a multiple of the range before",
        source="largest seen in healthy scripts of the corpus: 1.2; wider than 3.5 deviations (Iglewicz, Hoaglin "
        "1993): heavy tails",
    )
    spike_level = Threshold(
        0.5,
        "least height of a spike as a share of the median",
        source="chosen: a loss that rises by less has not jumped",
    )
    spike_progress = Threshold(
        0.2,
        "least height of a spike as a share of the loss's fall",
        source="the noise of a converged loss is small and its spikes harmless",
    )
    spike_spread = Threshold(
        64, "steps whose range is the spread that a spike is compared with", source="heavy tails show only now and then"
    )
    spike_steps = Threshold(
        10, "steps within which a spike must be over", source="what lasts longer is a divergence or a new level"
    )
    spike_warm_up = Threshold(12, "losses before any spike is looked for", source="more than half of `spike_before`")
    fires_on = Examples(
        lambda: losses(50, lambda i: (2.0 - 0.02 * i + 0.05 * sample_noise(i)) * (4.0 if i == 30 else 1.0)),
        lambda: losses(50, lambda i: 2.0 - 0.02 * i + 0.05 * sample_noise(i) + {30: 6.0, 31: 3.0, 32: 1.5}.get(i, 0.0)),
    )
    silent_on = Examples(
        lambda: losses(60, lambda i: 2.0 - 0.02 * i + 0.4 * sample_noise(i)),
        lambda: losses(
            60, lambda i: 0.01 + 2.0 * 0.8**i + (0.05 if i == 50 else 0.0)
        ),  # small beside what it has learned
        lambda: losses(60, lambda i: 1.0 if i < 30 else 9.0),  # does not recover: HLTH710
        lambda: losses(60, lambda i: 2.0 - 0.02 * i + (3.0 if i == 30 else 0.0), lr=lambda i: 0.01 if i < 29 else 0.1),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._open: dict[int, tuple[int, float, float, float]] = {}  # optimizer -> (step, peak, median, spread)

    def judge(self, step: Step, series: Series) -> Findings:
        key, loss = step.optimizer, series.losses[-1]
        if key in self._open:
            at, peak, middle, spread = self._open[key]
            self._open[key] = at, max(peak, loss), middle, spread
            if loss <= middle + spread:
                del self._open[key]
                evidence = {"peak": max(peak, loss), "median_before": middle, "steps": step.step - at}
                yield self.finding(step, step=at, subject=("loss",), evidence=evidence)
            elif series.count and step.step - at > self.spike_steps:
                del self._open[key]
            return
        usual = int(self.spike_before)
        before = series.last(usual + 1)[:-1]
        if len(before) < self.spike_warm_up or series.restarted(usual):
            return
        longer = series.last(int(self.spike_spread) + 1)[:-1]
        middle, spread = statistics.median(before), max(longer) - min(longer)
        height = loss - middle
        fallen = max(series.first - min(before), 0.0)
        if height > self.spike_height * spread and height > max(
            self.spike_progress * fallen, self.spike_level * abs(middle)
        ):
            self._open[key] = step.step, loss, middle, spread
