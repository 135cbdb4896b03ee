"""HLTH714: a trainable parameter's gradient is always zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.hlth.samples import SampledRule, parameters, sampled, weight
from ddpdebug.detectors.kinds import Examples, Facts, Fields, Findings, Severity, Step, Threshold
from ddpdebug.schema.announcements import SoftmaxOfOne
from ddpdebug.schema.details import LayerParameter

_ONE: dict[str, Any] = {"kind": "softmax of one", "step": 0, "operation": "LogSoftmax", "shape": [32, 1]}
_CONSTANT: Fields = {
    "severity": Severity.ERROR,
    "title": "the loss is constant: its softmax has one output to choose from",
    "phase": "constant loss",
    "causes": ("cross entropy over one output: the probability of the only class is 1, whatever the model says",),
    "actions": (
        "for one yes or no: `F.binary_cross_entropy_with_logits` on the output, with float targets of its shape",
        "for a number: `F.mse_loss`",
        "for classes: one output for each class in the last layer",
        "where a softmax is meant, look at its `dim`",
    ),
}


class ZeroGradient(SampledRule):
    """The parameter takes part in backward and its gradient is exactly 0 in every sampled step.

    A gradient that is `None` is SYNC207.

    Impact: the parameter only decays or stays as initialised.

    Diagnosis: some zeros follow from the algebra: a bias in front of BatchNorm, the bias of attention's keys, the row
    of `padding_idx`, an embedding of unused tokens. Otherwise walk from the parameter to the loss with
    `tensor.register_hook(print)` and find the first module whose output gradient is not zero: the zero arises behind
    it.

    Causes:
    - an operation that is flat: round, argmax, sign, a comparison, a clamp beyond its limits, softmax over one element
    - a factor of 0: loss weight, gate, mask or residual scale initialised to 0 on both sides of a product
    - dead units between the parameter and the loss
    - underflow in float16 without loss scaling
    - algebra: a bias that the following normalisation removes

    Remedy:
    - replace flat operations by a straight-through estimator or a soft version
    - initialise only one factor of a product to 0
    - cross entropy over a single logit is constant: use `F.binary_cross_entropy_with_logits`
    - use `torch.amp.GradScaler` or bfloat16 against underflow
    - remove what is redundant (`bias=False` before BatchNorm)
    """

    code = "HLTH714"
    severity = Severity.WARNING
    title = "a trainable parameter's gradient is always zero"
    zero_gradient_samples = Threshold(
        6,
        "samples in which a gradient was zero, and no other was seen",
        source="an expert of a mixture may get no token for a few batches",
    )
    zero_gradient_steps = Threshold(16, "steps over which the samples must lie", source="as `zero_gradient_samples`")
    topics = ("alone",)
    fires_on = Examples(
        lambda: (
            Facts(topic="alone:loss", values={0: {**_ONE, "location": "train.py:31"}, 1: _ONE}),
            *sampled(24, lambda i: {"w": weight(grad_norm=0.0), "b": weight(grad_norm=0.0, dim=1)}),
        ),
        lambda: sampled(24, lambda i: {"w": weight(grad_norm=0.0), "v": weight()}),
        lambda: sampled(24, lambda i: {"gate": weight(grad_norm=0.0, dim=1), "v": weight()}),
    )
    silent_on = Examples(
        lambda: sampled(24, lambda i: {"lora_a": weight(grad_norm=0.0 if i == 0 else 0.1), "v": weight()}),
        lambda: sampled(24, lambda i: {"expert": weight(grad_norm=0.0 if i % 7 else 0.1), "v": weight()}),
        lambda: sampled(
            24,
            lambda i: {"conv.weight": weight(), "conv.bias": weight(grad_norm=0.0, dim=1), "bn.weight": weight(dim=1)},
            lambda i: {"bn": {"class": "BatchNorm2d"}},
        ),
        lambda: sampled(24, lambda i: {"w": weight(grad_norm=None), "v": weight()}),  # SYNC207
        # a critic's last bias cancels in the loss
        lambda: sampled(24, lambda i: {"out.weight": weight(), "out.bias": weight(grad_norm=0.0, dim=1)}),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._zero: dict[tuple[int, str], tuple[int, int]] = {}  # -> (first step, samples)
        self._done: set[tuple[int, str]] = set()
        self._one: SoftmaxOfOne | None = None

    def compare(self, topic: str, facts: Mapping[int, Any]) -> Findings:
        del topic
        if self._one is None:
            self._one = next((fact for _, fact in sorted(facts.items()) if isinstance(fact, SoftmaxOfOne)), None)
        yield from ()

    def detect(self, step: Step) -> Findings:
        table = parameters(step)
        new, enough = [], int(self.zero_gradient_samples)
        harmless = _cancelling(table)
        for name, about in table.items():
            key = (step.optimizer, name)
            if key in self._done:
                continue
            if about.grad_norm != 0 or name in harmless:
                self._done.add(key)
                continue
            first, samples = self._zero.get(key, (step.step, 0))
            self._zero[key] = first, samples + 1
            if samples + 1 >= enough and step.step - first >= self.zero_gradient_steps:
                self._done.add(key)
                new.append(name)
        if not new:
            return
        evidence: dict[str, Any] = {"parameters": f"{len(new)} of {len(table)}", "samples": enough}
        fields: Fields = {}
        if self._one is not None and len(new) == sum(about.grad_norm is not None for about in table.values()):
            evidence |= {"operation": self._one.operation, "shape": list(self._one.shape)}
            fields = {**_CONSTANT, "location": self._one.location}
        first = min(self._zero[step.optimizer, name][0] for name in new)
        yield self.finding(step, step=first, subject=tuple(new[:20]), evidence=evidence, **fields)


def _cancelling(table: Mapping[str, LayerParameter]) -> set[str]:
    """Return biases that cancel behind their layer: a gradient reaches its weight, so no path is cut."""
    return {
        name
        for name in table
        if name.endswith("bias")
        and (weights := table.get(name.removesuffix("bias") + "weight")) is not None
        and weights.grad_norm
    }
