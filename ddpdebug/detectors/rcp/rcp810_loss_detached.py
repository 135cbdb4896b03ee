"""RCP810: the loss is detached from part of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.base import Examples, Facts
from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import gradients, steps
from ddpdebug.detectors.kinds import EventRule
from ddpdebug.schema.announcements import DetachedParameters, NoGradParameters
from ddpdebug.schema.finding import Severity

_NO_GRAD = {"kind": "no_grad", "step": 3, "names": ["encoder.weight"], "modules": ["encoder"], "location": "t.py:9"}
_FACT = {"kind": "detached", "step": 2, "names": ["encoder.weight"], "after": "encoder", "before": "decoder"}

_UNUSED: dict[str, Any] = {
    "without_grad": 1,
    "presence_digest": 77,
    "gradients": gradients(4, missing=["encoder.weight"]),
}


class LossDetached(EventRule):
    """Modules that ran and hold trainable parameters get no gradient, and the forward cuts the graph on the way.

    Modules that the forward ran under `no_grad` only are a `warning`: some recipes train a part from a later step on.

    Impact: they receive no gradient and do not train; with DDP the next forward may fail over unused parameters, or
    silently train the rest.

    Diagnosis: check `requires_grad` and `grad_fn` of the output of each module on the way to the loss: the first
    that has none marks the cut. Search for `detach`, `.data`, `.item()`, `.numpy()`, `torch.tensor(...)`, `argmax`,
    `no_grad` and `inference_mode` between the named module and the loss.

    Causes:
    - `detach()`, `.data` or a round trip through numpy or Python numbers on the path
    - `torch.no_grad()` or `inference_mode()` around more than was meant
    - `torch.tensor(values)` around existing tensors instead of `torch.stack(values)`
    - a discrete operation: argmax, sampling, rounding
    - `checkpoint(..., use_reentrant=True)` with inputs that do not require grad

    Remedy:
    - keep tensors as tensors (`torch.stack`, `torch.cat`); move `no_grad` to the teacher only; use `checkpoint(...,
      use_reentrant=False)`; use a straight-through estimator or Gumbel softmax for discrete choices
    - freeze the part with `requires_grad_(False)` before DDP wraps the model if the cut was intended
    """

    code = "RCP810"
    severity = Severity.ERROR
    title = "the loss is detached from part of the model"
    events = ("audit:detached", "audit:no_grad")
    fires_on = Examples(
        lambda: (
            (Facts(topic="alone:audit", values={0: _FACT, 1: _FACT}),),
            (*steps(2), Facts(topic="alone:audit", values={1: {**_FACT, "after": "encoder.3", "before": "head"}})),
            (*steps(2), Facts(topic="alone:audit", values={0: _NO_GRAD, 1: _NO_GRAD}), *steps(9, start=2, **_UNUSED)),
        )
    )
    silent_on = Examples(
        lambda: (
            steps(3),
            (Facts(topic="alone:audit", values={0: {**_FACT, "kind": "unregistered"}}),),
        )
    )

    def judge(self, fact: DetachedParameters | NoGradParameters) -> Mapping[str, Any] | None:
        evidence: dict[str, Any]
        if isinstance(fact, DetachedParameters):
            severity, evidence = self.severity, {"cut_between": [fact.after, fact.before]}
        else:
            severity = Severity.WARNING
            evidence = {"observed": "run without gradients by a forward that trains", "modules": list(fact.modules)}
        return {
            "severity": severity,
            "step": 0,
            "last_step": fact.step,
            "subject": fact.names[:MAX_NAMES],
            "evidence": evidence,
        }
