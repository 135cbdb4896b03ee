"""HLTH706: a weight norm runs away or collapses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.hlth.samples import BROKEN, LayerRule, parameters, sampled, weight
from ddpdebug.findings import Finding, Severity
from ddpdebug.steps import Step


class WeightNormDrift(LayerRule):
    """The norm of a parameter grows or shrinks persistently, well outside its range earlier in the run.

    Impact: growth ends in saturation, overflow or, before a normalisation layer, in a learning rate that shrinks
    effectively; collapse removes the layer from the model.

    Diagnosis: compare with the other parameters of the same kind and with weight decay times learning rate. Weights
    in front of a normalisation grow under plain gradient steps without changing the function: judge them by HLTH705.
    Logits or embeddings that grow with the loss still falling point to overconfidence.

    Causes:
    - no weight decay on a scale-invariant weight, or a learning rate that is too high
    - weight decay too strong, or applied to norms, biases and embeddings
    - a parameter with no useful gradient left, so that only decay acts on it
    - decay as L2 in Adam (`torch.optim.Adam(weight_decay=...)`) where decoupled decay was meant

    Remedy:
    - use `torch.optim.AdamW`; put norms, biases and often embeddings into a group with `weight_decay=0.0`; tune decay
      and rate together, since their product sets the equilibrium
    - bound logits by a z-loss or a temperature if they run away
    """

    code = "HLTH706"
    severity = Severity.WARNING
    title = "a weight norm runs away or collapses"
    follows = (*BROKEN, "HLTH705")
    fires_on = (
        sampled(40, lambda i: {"w": weight(norm=4.0 * 1.1**i), "v": weight()}),
        sampled(60, lambda i: {"w": weight(norm=4.0 * 0.9**i), "v": weight()}),
    )
    silent_on = (
        sampled(60, lambda i: {"w": weight(norm=4.0 + 0.3 * i)}),
        sampled(60, lambda i: {"lora_b": weight(norm=1e-4 + 0.1 * i)}),  # begins at 0
        sampled(60, lambda i: {"w": weight(norm=4.0 if i < 3 else 50.0)}),  # loaded, and then it stays
        sampled(60, lambda i: {"bias": weight(norm=0.5 * 1.1**i, dim=1)}),
    )

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._first: dict[tuple[int, str], float] = {}
        self._last: dict[tuple[int, str], float] = {}

    def folds(self, finding: Finding, cause: Finding) -> bool:
        return cause.code != "HLTH705" or cause.phase == "large"

    def judge(self, step: Step) -> Mapping[str, Any] | None:
        table = parameters(step)
        found: dict[str, Any] = {}
        for name, about in table.items():
            norm, key = about["norm"], (step.optimizer, name)
            if about["dim"] < 2 or norm is None:
                continue
            first, last = self._first.setdefault(key, norm), self._last.get(key, norm)
            self._last[key] = norm
            if first < self.limit("weight_tiny") * about["numel"] ** 0.5:
                continue
            grows = norm >= self.limit("weight_growth") * first and norm > self.limit("weight_growing") * last
            falls = norm <= self.limit("weight_collapse") * first and norm < last
            if grows or falls:
                found[name] = {"norm": norm, "first": first, "change": norm / first}
        return found if table else None
