"""RCP820: eval mode is not deterministic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.base import Examples, Facts
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule
from ddpdebug.schema.announcements import EvalDropout
from ddpdebug.schema.finding import Severity

_FACT = {
    "step": 20,
    "function": "dropout",
    "p": 0.1,
    "module": "encoder.0",
    "class": "Block",
    "location": "model.py:31",
}
_ATTENTION = {**_FACT, "function": "scaled_dot_product_attention", "p": None, "location": "model.py:24"}


class EvalNotDeterministic(EventRule):
    """A dropout function was active inside a module in eval mode: the same batch gives other outputs each time.

    While training it is looked for in evaluations that go through DDP's forward: once one has drawn random numbers,
    the next tells which module's own code does, and the source of that module names the call. `model.module(x)` and
    compiled models are not seen; `ddpdebug preflight` runs a batch twice.

    Impact: validation metrics carry noise that does not come from the data, and are worse than the model is; exported
    models behave randomly.

    Diagnosis: run the batch twice and hook the leaf modules: the first whose outputs differ for equal inputs is the
    place. Set the same seed before both: if the difference disappears it is a random draw, if it stays it is a
    nondeterministic operation or state that forward changes.

    Causes:
    - `F.dropout(x, p)` without `training=self.training`: its default is True
    - `F.scaled_dot_product_attention(dropout_p=p)`, which applies dropout in eval mode as well
    - noise, sampling, random masks or stochastic depth not guarded by `self.training`
    - state that forward updates in eval mode: caches, counters, codebooks
    - sampling on purpose (Monte Carlo dropout, variational or diffusion models)

    Remedy:
    - use `nn.Dropout`, or pass `training=self.training`; `dropout_p=self.p if self.training else 0.0` for attention
    - guard noise by `self.training`
    - where sampling is part of the model, draw from a `torch.Generator` that evaluation seeds; for Monte Carlo dropout
      put the `nn.Dropout` modules alone into train mode, which is not reported
    """

    code = "RCP820"
    severity = Severity.WARNING
    title = "eval mode is not deterministic"
    events = ("chance",)
    fires_on = Examples(
        lambda: (
            (Facts(topic="alone:chance", values={0: _FACT, 1: _FACT}),),
            (*steps(2), Facts(topic="alone:chance", values={1: _ATTENTION})),
        )
    )
    silent_on = Examples(
        lambda: (
            steps(3),
            (Facts(topic="alone:validation", values={0: {"step": 20, "forwards": 4, "since": 0}}),),
        )
    )

    def judge(self, fact: EvalDropout) -> Mapping[str, Any] | None:
        evidence: dict[str, Any] = {"function": fact.function, "class": fact.class_name, "mode": "eval"}
        if fact.others:
            evidence["others"] = list(fact.others)
        if fact.p is not None:
            evidence["p"] = fact.p
        return {"subject": (fact.module,), "evidence": evidence}
