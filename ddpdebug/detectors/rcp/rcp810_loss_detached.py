"""RCP810: the loss is detached from part of the model."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import gradients, steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import DetachedParameters, NoGradParts

_MAX_MODULES = 5
_PART = {"path": "encoder", "names": ["encoder.weight"], "location": "t.py:9", "in_eval": False, "copy_of": None}
_FACT = {"kind": "detached", "step": 2, "names": ["encoder.weight"], "after": "encoder", "before": "decoder"}

_UNUSED: dict[str, Any] = {
    "without_grad": 1,
    "presence_digest": 77,
    "gradients": gradients(4, missing=["encoder.weight"]),
}


def _no_grad(*parts: dict[str, Any]) -> tuple[Facts]:
    told = [{**_PART, "written": False, **part} for part in parts]
    return (Facts(topic="alone:audit", values={1: {"kind": "no_grad", "step": 3, "parts": told}}),)


class LossDetached(EventRule):
    """Modules that ran and hold trainable parameters get no gradient, and the forward cuts the graph on the way.

    Modules that the forward ran under `no_grad` only are a `warning`: some recipes train a part from a later step on.

    Impact: these parts receive no gradient and do not train; with DDP the next forward may fail over unused parameters,
    or silently train the rest.

    Diagnosis: check `requires_grad` and `grad_fn` of the output of each module on the way to the loss: the first
    that has none marks the cut. Search for `detach`, `.data`, `.item()`, `.numpy()`, `torch.tensor(...)`, `argmax`,
    `no_grad` and `inference_mode` between the named module and the loss.

    Causes:
    - `run without gradients`: `torch.no_grad()` or `inference_mode()` around more than was meant
    - `detach()`, `.data` or a round trip through numpy or Python numbers on the path
    - `torch.tensor(values)` around existing tensors instead of `torch.stack(values)`
    - a discrete operation: argmax, sampling, rounding
    - `checkpoint(..., use_reentrant=True)` with inputs that do not require grad

    Remedy:
    - `run without gradients`: move `no_grad` to what shall not train (a teacher), and nothing else
    - take the `detach()` or `.data` out, keep tensors as tensors (`torch.stack`, `torch.cat`); use `checkpoint(...,
      use_reentrant=False)`; use a straight-through estimator or Gumbel softmax for discrete choices
    - freeze the part with `requires_grad_(False)` before DDP wraps the model if the cut was intended
    """

    code = "RCP810"
    severity = Severity.ERROR
    title = "the loss is detached from part of the model"
    events = ("audit:detached", "audit:no_grad")
    fires_on = Examples(
        lambda: Facts(topic="alone:audit", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), Facts(topic="alone:audit", values={1: {**_FACT, "after": "encoder.3", "before": "head"}})),
        lambda: (*steps(2), *_no_grad({}), *steps(9, start=2, **_UNUSED)),
        lambda: _no_grad({"in_eval": True}, {"path": "body"}),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: Facts(topic="alone:audit", values={0: {**_FACT, "kind": "unregistered"}}),
        lambda: _no_grad({"in_eval": True}),
        lambda: _no_grad({"copy_of": "student"}),  # a teacher, a target network
        lambda: _no_grad({"written": True}),  # an average of weights
        _no_grad,  # what an older version said of it cannot be read
    )

    def judge(self, fact: DetachedParameters | NoGradParts) -> Fields | None:
        about: dict[str, Any] = {"step": 0, "last_step": fact.step}
        if isinstance(fact, DetachedParameters):
            evidence = {"cut_between": [fact.after, fact.before]}
            return {**about, "subject": fact.names[:MAX_NAMES], "evidence": evidence}
        parts = [part for part in fact.parts if not (part.in_eval or part.copy_of is not None or part.written)]
        if not parts:
            return None
        return {
            **about,
            "severity": Severity.WARNING,
            "location": parts[0].location,
            "subject": tuple(name for part in parts for name in part.names)[:MAX_NAMES],
            "evidence": {
                "observed": "run without gradients by a forward that trains",
                "modules": [part.path for part in parts[:_MAX_MODULES]],
            },
        }
