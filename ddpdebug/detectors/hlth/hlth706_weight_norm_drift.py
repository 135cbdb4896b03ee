"""HLTH706: a weight norm runs away or collapses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, ClassVar

from ddpdebug.detectors.hlth.hlth705_update_ratio import UpdateRatio
from ddpdebug.detectors.hlth.hlth715_poor_initialisation import PoorInitialisation
from ddpdebug.detectors.hlth.samples import LayerRule, activation, parameters, sampled, sites, weight
from ddpdebug.detectors.kinds import Examples, Fields, Finding, Severity, Step, Threshold
from ddpdebug.schema.row import Flag

_VARIANCE = "variance"


class WeightNormDrift(LayerRule):
    """The norm of a parameter grows or shrinks persistently, well outside its range earlier in the run.

    The same is said of the variance of a hidden layer's output: its standard deviation explodes or dies, compared with
    what the layer gave in its first samples. HLTH715 looks at the first batch alone; this is drift, seen behind the
    weights instead of in them, and hence this code.

    Impact: growth ends in saturation, overflow or, before a normalisation layer, in a learning rate that shrinks
    effectively; collapse removes the layer from the model.

    Diagnosis: compare with the other parameters of the same kind and with weight decay times learning rate. Weights
    in front of a normalisation grow under plain gradient steps without changing the function: judge them by HLTH705.
    Logits or embeddings that grow with the loss still falling point to overconfidence. An output whose variance dies
    is nearly the same for every input: find the first layer, in the order of the forward, whose output does so. One
    that explodes is bounded by a normalisation behind it, or reaches the loss.

    Causes:
    - `grew`: no weight decay on a scale-invariant weight, or a learning rate that is too high
    - `grew`: a loss that pushes outputs apart without a bound: no margin, no temperature, logits that nothing limits
    - `shrank`: weight decay too strong, or applied to norms, biases and embeddings
    - `shrank`: a parameter with no useful gradient left, so that only decay acts on it
    - `shrank`: decay as L2 in Adam (`torch.optim.Adam(weight_decay=...)`) where decoupled decay was meant
    - `variance`: units that died or saturated (HLTH703, HLTH704), a residual stream that nothing normalises, a
      representation that has collapsed (contrastive and self-distilled training without their counterweight)

    Remedy:
    - `grew`: lower the rate, use `torch.optim.AdamW` with decay, or bound logits by a margin, a z-loss or a temperature
    - `shrank`: lower `weight_decay`; use `torch.optim.AdamW`; put norms, biases and often embeddings into a group with
      `weight_decay=0.0`
    - `variance`: normalise before or after the layer whose output drifts, scale residual branches down with depth
    """

    code = "HLTH706"
    severity = Severity.WARNING
    title = "a weight norm runs away or collapses"
    init_large = PoorInitialisation.init_large
    titles: ClassVar[Mapping[str, str]] = {
        "grew": "a weight norm runs away",
        "shrank": "a weight norm collapses",
        _VARIANCE: "the variance of a layer's output explodes or dies",
    }
    variance_collapse = Threshold(
        0.01,
        "standard deviation of a hidden layer's output over its first samples",
        source="smallest seen in healthy scripts of the corpus: 0.65",
    )
    variance_explosion = Threshold(
        100,
        "the same, growing; it must also be as large as `init_large`",
        source="largest seen in healthy scripts of the corpus: 12 (an expert); a divergence shows 1e5",
    )
    variance_samples = Threshold(
        4,
        "first samples of a layer, whose median its output is compared with",
        source="the samples that are taken in a row; in the median one odd batch does not count",
    )
    update_large = UpdateRatio.update_large
    weight_began = Threshold(
        3,
        "newest step whose update, `update_large` of its norm, shows that a weight began near 0",
        source="in one process the first sample is that of the second step, when zeros have been moved already",
    )
    weight_collapse = Threshold(
        0.05,
        "a weight's norm as a multiple of its first one",
        source="smallest seen in healthy scripts of the corpus: 0.80",
    )
    weight_growing = Threshold(
        1.01,
        "growth since the sample before, from which on a norm is still growing",
        source="weights that were loaded or have settled stay within 1 %",
    )
    weight_growth = Threshold(
        20,
        "a weight's norm as a multiple of its first one, still growing",
        source="largest seen in healthy scripts of the corpus: 9.4 (the last layer of a regression on large targets)",
    )
    weight_tiny = Threshold(
        0.001,
        "root mean square of a first weight that was meant to grow",
        source="zeros, LoRA, gates; an initialisation of 1/sqrt(inputs) is above 1e-3 up to a million inputs",
    )
    fires_on = Examples(
        lambda: sampled(40, lambda i: {"w": weight(norm=4.0 * 1.1**i), "v": weight()}),
        lambda: sampled(60, lambda i: {"w": weight(norm=4.0 * 0.9**i), "v": weight()}),
        lambda: sampled(30, modules=lambda i: {"fc": activation(std=0.5 * 1.3**i), "act": activation("relu")}),
        lambda: sampled(40, modules=lambda i: {"encoder (input)": activation("tanh", std=0.5 if i < 20 else 1e-4)}),
    )
    silent_on = Examples(
        lambda: sampled(60, lambda i: {"w": weight(norm=4.0 + 0.3 * i)}),
        lambda: sampled(60, lambda i: {"lora_b": weight(norm=1e-4 + 0.1 * i)}),  # begins at 0
        lambda: sampled(60, lambda i: {"up": weight(norm=0.2 * (i + 1), update=0.2)}),  # seen after its first step
        lambda: sampled(60, lambda i: {"w": weight(norm=4.0 if i < 3 else 50.0)}),  # loaded, and then it stays
        lambda: sampled(60, lambda i: {"bias": weight(norm=0.5 * 1.1**i, dim=1)}),
        lambda: sampled(60, modules=lambda i: {"fc": activation(std=0.5 + 0.3 * i)}),
        lambda: sampled(60, modules=lambda i: {"adapter": activation(std=1e-6 * 1.3 ** min(i, 55))}),  # begins at 0
        lambda: sampled(60, modules=lambda i: {"fc": activation(std=0.5 if i % 3 else 1e-6)}),  # now and then
        lambda: sampled(60, modules=lambda i: {"head": activation(std=0.01 * 1.3**i, hidden=False)}),
        lambda: sampled(9, modules=lambda i: {"fc": activation(std=0.0)}),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._first: dict[tuple[int, str], float] = {}
        self._last: dict[tuple[int, str], float] = {}
        self._begun_near_0: dict[tuple[int, str], bool] = {}  # of a weight in its first sample
        self._spread: dict[tuple[int, str], list[float]] = {}  # standard deviations in a layer's first samples
        self._layers: set[str] = set()

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        if cause.code == "HLTH705":
            return cause.phase == "large"
        if cause.code in {"HLTH703", "HLTH704"}:  # these explain an output, and no weight
            return finding.phase == _VARIANCE
        return True

    def phase(self, name: str) -> str | None:
        return _VARIANCE if name in self._layers else self._found[name]["change"].partition(" ")[0]

    def judge(self, step: Step) -> Fields | None:
        table = parameters(step)
        # outputs follow weights that run away: these are the finding
        told = any(key[0] == step.optimizer and key[1] not in self._layers for key in self._told)
        found = {} if told else self._drifting(step)
        self._layers.update(found)
        for name, about in table.items():
            norm, key = about.norm, (step.optimizer, name)
            if about.dim < 2 or norm is None:
                continue
            first, last = self._first.setdefault(key, norm), self._last.get(key, norm)
            self._last[key] = norm
            if key not in self._begun_near_0 and step.step <= self.weight_began:
                self._begun_near_0[key] = (about.update or 0.0) >= self.update_large * norm
            if first < self.weight_tiny * math.sqrt(about.numel) or self._begun_near_0.get(key):
                continue
            grows = norm >= self.weight_growth * first and norm > self.weight_growing * last
            falls = norm <= self.weight_collapse * first and norm < last
            if grows or falls:
                found[name] = {"change": _change(norm, first), "norm": norm, "at_first": first}
        return found if table or sites(step) else None

    def _drifting(self, step: Step) -> dict[str, Any]:
        """Return the layers whose output varies far more, or far less, than in their first samples, on every rank."""
        if step.any(Flag.LOADED):
            self._spread = {key: stds for key, stds in self._spread.items() if key[0] != step.optimizer}
        found: dict[str, Any] = {}
        for path, ranks in sites(step).items():
            stds = [about.std for about in ranks if about.hidden and about.std is not None]
            if len(stds) < len(ranks):
                continue
            first = self._spread.setdefault((step.optimizer, path), [])
            if len(first) < self.variance_samples:
                first.append(statistics.fmean(stds))
                continue
            usual = statistics.median(first)
            most = max(self.variance_explosion * usual, self.init_large)
            if usual and (min(stds) >= most or max(stds) <= self.variance_collapse * usual):
                now = statistics.fmean(stds)
                found[path] = {"change": _change(now, usual), "std": now, "at_first": usual, "mean": ranks[0].mean}
        return found


def _change(now: float, first: float) -> str:
    """Return `grew 52-fold`, `shrank 108-fold`."""
    return f"grew {now / first:.3g}-fold" if now > first else f"shrank {first / now:.3g}-fold" if now else "shrank to 0"
