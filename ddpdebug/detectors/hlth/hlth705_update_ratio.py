"""HLTH705: the ratio of update to weight is outside its healthy range."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import ClassVar

from ddpdebug.detectors import causality
from ddpdebug.detectors.hlth.curve import CurveRule, Series
from ddpdebug.detectors.hlth.samples import SampledRule, parameters, ratios, sampled, weight
from ddpdebug.detectors.kinds import Examples, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.schema.details import LayerParameter

_USUAL = {f"h{k}": weight() for k in range(16)}


class UpdateRatio(SampledRule, CurveRule):
    """The ratio of the weights' update to their norm stays outside its usual band; a rule of thumb is 1e-3.

    Impact: the layer forgets and the run becomes unstable (far above), or the layer hardly trains (far below).

    Diagnosis: see whether all parameters are off (learning rate) or single ones (their gradient, group or scale).
    Small by design are layers with a reduced rate; large by design are parameters near 0, such as biases and gates
    just after initialisation: look at the weight's norm as well. Print the parameter group that holds it.

    Causes:
    - `group`: the parameter is in a group with another rate or decay than intended
    - `large`: a learning rate that is too high for this optimizer: a value for SGD given to Adam
    - `small`: a learning rate that is too low for this optimizer: a value for Adam given to SGD, or a schedule at its
      end
    - its gradient is tiny or huge: vanishing, exploding, a badly scaled loss term
    - weights initialised far too large or too small
    - half-precision weights, whose rounding swallows small updates

    Remedy:
    - `group`: change the rate of the group, not of the whole model
    - `large`: lower the learning rate (1e-3 to 1e-4 are usual for Adam); use warm-up when the ratio is high only in the
      first steps
    - `small`: raise the learning rate; a range test finds its order of magnitude
    - correct initial scales
    - keep the weights in float32 and autocast the computation
    """

    code = "HLTH705"
    severity = Severity.WARNING
    title = "the ratio of update to weight is outside its healthy range"
    titles: ClassVar[Mapping[str, str]] = {
        "small": "the updates are too small for the weights",
        "large": "the updates are too large for the weights",
    }
    reads = None  # the learning rates of the steps between count
    update_first = Threshold(
        1,
        "median ratio of update to weight that is too large in the first steps",
        source="a weight that begins near 0 may move by more than its size, most weights do not",
    )
    update_gap = Threshold(
        1000,
        "rate of a group over the next smaller one, from which on smaller groups are judged separately",
        source="rates that fall by layer lie less than 2 apart (ELECTRA takes 0.8); a fine-tuned body has a tenth to a "
        "hundredth of its head's",
    )
    update_large = Threshold(
        0.3,
        "median of update norm / weight norm over the weights that is too large",
        source="300 times the 1e-3 of Karpathy's CS231n notes; largest seen in healthy scripts of the corpus, after "
        "the first steps: 0.12",
    )
    update_samples = Threshold(
        4,
        "samples that are judged together, all but one too large",
        source="one large update alone is a batch",
    )
    update_group = Threshold(
        1e-05,
        "ratio of update to weight of such a parameter that hardly moves; also `update_gap` below the others' median",
        source="a hundredth of the 1e-3 of Karpathy's CS231n notes; AdamW moves a body fine-tuned at 1e-6 by 5e-5",
    )
    update_small = Threshold(
        1e-06,
        "median of update norm / weight norm over the weights, below which weights hardly move",
        source="a thousandth of the 1e-3 of Karpathy's CS231n notes; SageMaker's WeightUpdateRatio takes 1e-8",
    )
    update_small_samples = Threshold(5, "samples, none of which moves the weights", source="as `update_small_steps`")
    update_small_steps = Threshold(
        32,
        "steps over which the samples must lie",
        source="longer than a warm-up that begins at 0 takes to move the weights",
    )
    update_warm_up = Threshold(
        4,
        "first steps, in which only `update_first` counts",
        source="Adam's first updates have the size of the rate, whatever the gradient is (Kingma, Ba 2015)",
    )
    fires_on = Examples(
        lambda: sampled(12, lambda i: {"w": weight(update=4.0)}),
        lambda: sampled(40, lambda i: {f"l{k}.weight": weight(update=1e-6) for k in range(4)}),
        lambda: sampled(40, lambda i: {"body": weight(), "mid": weight(), "head": weight(update=1e-7, lr=1e-6)}),
    )
    silent_on = Examples(
        lambda: sampled(12, lambda i: {"w": weight(update=4.0 if i < 6 else 0.4)}),  # the first steps of Adam
        lambda: sampled(60, lambda i: {"w": weight(update=1e-6 if i > 5 else 1e-3)}),  # it has converged
        lambda: sampled(60, lambda i: {"w": weight(update=1e-9 * i)}, lr=0.0),  # warm-up begins at 0
        lambda: sampled(60, lambda i: {"w": weight(), "frozen": weight(update=0.0), "head": weight()}),
        lambda: sampled(60, lambda i: {"w": weight(), "frozen": weight(update=0.0, lr=0.0), "head": weight()}),
        lambda: sampled(60, lambda i: {f"l{k}": weight(update=1e-6, lr=0.1 * 0.2**k) for k in range(8)} | _USUAL),
        lambda: sampled(60, lambda i: {"body": weight(update=1e-4, lr=1e-5)} | _USUAL),  # it trains all the same
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._past: dict[int, deque[tuple[int, float]]] = {}
        self._largest: dict[int, float] = {}
        self._begin: dict[int, tuple[int, int]] = {}
        self._rates: dict[int, Series] = {}
        self._told: set[int] = set()
        self._still: dict[tuple[int, str], list[tuple[int, float]]] = {}  # parameters far below the others' rate

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        return cause.code in causality.group("broken") or finding.phase in {"small", "group"}

    def _far_below(self, step: Step) -> dict[str, LayerParameter]:
        """Return the parameters with gradients whose rate lies far below that of others of their optimizer."""
        known = {n: p for n, p in parameters(step).items() if p.lr and p.grad_norm and p.norm and p.update is not None}
        rates = sorted({about.lr or 0.0 for about in known.values()})
        below = [low for low, high in itertools.pairwise(rates) if high >= self.update_gap * low]
        return {name: about for name, about in known.items() if below and (about.lr or 0.0) <= below[-1]}

    def _group(self, step: Step) -> Findings:
        """A group of parameters that a rate far below the others' hardly moves."""
        low = self._far_below(step)
        others = [ratio for name, ratio in ratios(step).items() if name not in low]
        usual = statistics.median(others) if others else 0.0
        for name, about in low.items():
            ratio = (about.update or 0.0) / (about.norm or 1.0)
            nil = ratio < self.update_group and ratio * self.update_gap < usual
            self._still.setdefault((step.optimizer, name), []).append((step.step, ratio if nil else math.inf))
        still = {
            name: seen
            for name in low
            if len(seen := self._still[step.optimizer, name]) >= self.update_small_samples
            and step.step - seen[0][0] >= self.update_small_steps
            and all(math.isfinite(ratio) for _, ratio in seen)
        }
        if not still:
            return
        self._told.add(step.optimizer)
        yield self.finding(
            step,
            step=min(seen[0][0] for seen in still.values()),
            subject=tuple(still)[:5],
            phase="group",
            title="a group's learning rate is too low to move its parameters",
            evidence={
                "ratios": {name: f"{seen[-1][1]:.3g}" for name, seen in list(still.items())[:10]},
                "lr": max(low[name].lr or 0.0 for name in still),
                "largest_lr": max(about.lr or 0.0 for about in parameters(step).values()),
                "median_of_the_others": usual,
                "parameters": len(still),
            },
        )

    def detect(self, step: Step) -> Findings:
        key, rate = step.optimizer, next(iter(step.rows.values())).lr
        if (series := self._rates.get(key)) is None:
            series = self._rates[key] = self.new_series()
        series.rated(rate)
        if not step.details:
            return
        if step.optimizer not in self._told:
            yield from self._group(step)
        table = ratios(step)
        if not table or key in self._told:
            return
        middle = statistics.median(table.values())
        together, least = int(self.update_samples), self.update_small_steps
        past = self._past.setdefault(key, deque(maxlen=together))
        past.append((step.step, middle))
        self._largest[key] = max(self._largest.get(key, 0.0), middle)
        first, count = self._begin.get(key, (step.step, 0))
        self._begin[key] = first, count + 1
        large = sum(ratio >= self.update_large for _, ratio in past)
        phase = None
        settled = past[0][0] >= self.update_warm_up or (past[0][1] >= self.update_first and len(table) > 1)
        if len(past) == together and large >= together - 1 and settled:
            phase = "large"
        elif count + 1 >= self.update_small_samples and step.step - first >= least and rate > 0:
            small = self._largest[key] < self.update_small
            phase = "small" if small and not series.restarted(int(least)) else None
        if phase is None:
            return
        self._told.add(key)
        worst = sorted(table, key=lambda name: table[name], reverse=phase == "large")
        yield self.finding(
            step,
            step=past[0][0] if phase == "large" else first,
            subject=tuple(worst[:5]),
            phase=phase,
            evidence={
                "median_ratio": middle,
                "ratios": {name: f"{table[name]:.3g}" for name in worst[:10]},
                "samples": [f"step {at}: {ratio:.3g}" for at, ratio in past],
                "lr": rate,
            },
        )
