"""HLTH715: initialisation lets the activations explode or die with depth, or is symmetric."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, ClassVar

from ddpdebug.detectors.hlth.hlth705_update_ratio import UpdateRatio
from ddpdebug.detectors.hlth.samples import SampledRule, activation, parameters, ratios, sampled, sites, weight
from ddpdebug.detectors.kinds import Examples, Fields, Findings, Severity, Step, Threshold
from ddpdebug.schema.details import LayerStatistics
from ddpdebug.schema.row import Flag

_KINDS = ("Linear", "Conv")


def _linear(std: float, leaf: int) -> Mapping[str, Any]:
    return {**activation(std=std, leaf=leaf), "class": "Linear"}


def _deep(factor: float, between: float | None = None) -> Mapping[str, Any]:
    spread = factor if between is None else between
    return {f"l{k}": {**_linear(factor**k, k), "spread": spread**k} for k in range(6)}


_ALIKE = "deep layers give nearly the same output for every input"


class PoorInitialisation(SampledRule):
    """On the first batch the activations explode or die with depth, or units of a layer start as copies of each other.

    Impact: training starts slowly, or not at all, and needs a small learning rate; symmetric units receive identical
    gradients and stay copies of each other.

    Diagnosis: print the std of each layer's output for the first batch and find the first layer that departs from
    order 1. For symmetric weights look for rows that are bitwise equal. Check that the initialiser reached the layer:
    `model.apply(init)` sees modules, not bare parameters, and a later `load_state_dict(strict=False)` may have loaded
    less than expected.

    Causes:
    - `symmetric`: a constant initialiser for a weight matrix, such as zeros or ones
    - `dies`: a saturating activation (tanh, sigmoid) or too small a gain, repeated over many layers
    - an initialiser that does not match: plain normal weights, wrong fan or gain, embeddings of std 1 tied to the head
    - depth without normalisation or without scaling of residual branches
    - inputs that are not normalised (DATA908)

    Remedy:
    - `symmetric`: draw weights at random; zeros only for biases and for the last layer of a residual branch
    - `torch.nn.init.kaiming_normal_(w, nonlinearity="relu")`, `xavier_uniform_` with `calculate_gain("tanh")`; std 0.02
      for embeddings and transformer weights, residual output projections divided by `sqrt(2 * layers)`
    - the default of `nn.Linear` has variance 1/(3 fan_in), which shrinks the signal in deep stacks without
      normalisation
    """

    code = "HLTH715"
    severity = Severity.WARNING
    title = "initialisation lets the activations explode or die with depth, or is symmetric"
    titles: ClassVar[Mapping[str, str]] = {
        "explodes": "the initial weights let the activations explode with depth",
        "dies": "the initial weights let the activations die with depth",
        "symmetric": "all units of a layer start with the same weights",
    }
    init_explode = Threshold(
        100,
        "growth of the activations' standard deviation from first to last hidden layer on the first batch",
        source="Glorot, Bengio 2010 and He et al. 2015 ask for a factor near 1; largest seen in healthy scripts of "
        "the corpus: 0.4",
    )
    init_fades = Threshold(
        0.0001,
        "deviation between inputs of the last hidden layer's units over the first layer's",
        source="calculated: the default of `nn.Linear` leaves 0.41 of it in each ReLU layer, 3e-4 after nine",
    )
    init_large = Threshold(
        10,
        "standard deviation of a hidden layer that is an explosion",
        source="unit variance is what Glorot, Bengio 2010 and He et al. 2015 aim at",
    )
    init_layers = Threshold(
        4, "hidden layers that a profile over the depth needs", source="two or three layers show no growth with depth"
    )
    init_step = Threshold(
        1,
        "newest step whose sample still shows the initialisation",
        source="in one process a model is known from the first step on, and its forwards from the second",
    )
    init_vanish = Threshold(
        0.001,
        "shrinking of the activations' standard deviation, as `init_explode`",
        source="Glorot, Bengio 2010; smallest seen in healthy scripts of the corpus: 0.17",
    )
    update_large = UpdateRatio.update_large
    fires_on = Examples(
        lambda: sampled(3, modules=lambda i: _deep(6.0)),
        lambda: sampled(3, modules=lambda i: _deep(0.2)),
        lambda: sampled(3, modules=lambda i: _deep(0.8, 0.1)),  # biases keep what all inputs have in common
        lambda: sampled(3, modules=lambda i: {**_deep(0.8, 0.05), "l9": {**_linear(1.0, 9), "spread": 0.0}}),
        lambda: sampled(3, lambda i: {"w": weight(symmetric=True)} if i == 0 else {"w": weight()}),
    )
    silent_on = Examples(
        lambda: sampled(
            3, modules=lambda i: {**_deep(0.8, 0.0), "l0": {**_linear(1.0, 0), "spread": 0.0}}
        ),  # one sample
        lambda: sampled(3, modules=lambda i: {**_deep(0.8), "l9": {**_linear(1.0, 9), "spread": 0.0}}),  # of a constant
        lambda: sampled(3, modules=lambda i: _deep(0.6)),
        lambda: sampled(3, modules=lambda i: _deep(2.0)),
        lambda: sampled(3, modules=lambda i: {**_deep(1.0), "out": {**_linear(1e-6, 9), "hidden": False}}),
        lambda: sampled(9, modules=lambda i: _deep(6.0 if i > 4 else 1.0)),  # not the first batch
        lambda: sampled(3, lambda i: {"w": weight(symmetric=False)}),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._seen: set[int] = set()

    def detect(self, step: Step) -> Findings:
        if step.optimizer in self._seen or not step.answers(LayerStatistics):
            return
        self._seen.add(step.optimizer)
        table = parameters(step)
        alike = [name for name, about in table.items() if about.symmetric]
        if alike:
            evidence = {"parameters": len(alike)}
            yield self.finding(step, subject=tuple(alike[:20]), phase="symmetric", evidence=evidence)
        # behind a step that has changed the weights much they are not the initial ones
        moved = step.step > 0 and statistics.median(ratios(step).values() or [0.0]) >= self.update_large
        if step.step <= self.init_step and not moved and not step.any(Flag.LOADED):
            yield from self._profile(step)

    def _profile(self, step: Step) -> Findings:
        seen = [
            (about.leaf, path, about.std, about.spread)
            for path, (about, *_) in sites(step).items()
            if about.role == "output" and about.hidden and about.std and any(w in about.class_name for w in _KINDS)
        ]
        seen.sort()
        if len(seen) < self.init_layers:
            return
        first, last = seen[0][2], seen[-1][2]
        grown = last / first
        explodes = grown >= self.init_explode and last >= self.init_large
        # none is left of what has faded altogether; nor is any where a batch is one sample, or the input a constant
        begin, end = seen[0][3], next((spread for *_, spread in reversed(seen) if spread), None)
        fades = bool(begin) and end is not None and end <= self.init_fades * (begin or 0.0)
        if explodes or fades or grown <= self.init_vanish:
            profile = {path: f"{std:.3g}" for _, path, std, _ in seen}
            evidence: dict[str, Any] = {"std_by_depth": profile, "std_of_last_over_first_layer": grown}
            if fades and begin:
                between = {path: f"{spread:.3g}" for _, path, _, spread in seen if spread is not None}
                lost = {"std_between_inputs_of_last_over_first_layer": (end or 0.0) / begin}
                evidence = {**lost, "std_between_inputs": between, **evidence}
            phase = "explodes" if explodes else "dies"
            title = _ALIKE if fades and not explodes else self.titles[phase]
            yield self.finding(step, title=title, subject=(seen[-1][1],), phase=phase, evidence=evidence)
