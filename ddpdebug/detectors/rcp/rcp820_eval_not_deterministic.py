"""RCP820: eval mode is not deterministic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import DrawingModule, DropoutCall, EvalDraws

_CALL = {"function": "dropout", "p": 0.1, "location": "model.py:31", "active": True}
_MODULE = {"path": "encoder.0", "class": "Block", "training": False, "draws_otherwise": False}
_ATTENTION = {**_CALL, "function": "scaled_dot_product_attention", "p": None, "location": "model.py:24"}
_NOISE = {**_CALL, "function": "randn_like", "p": None}
#: Calls that one finding names.
_MAX_CALLS = 8


def _draws(*calls: dict[str, Any], **more: Any) -> tuple[Facts]:
    told = {"step": 20, "modules": [{**_MODULE, **more, "calls": list(calls)}]}
    return (Facts(topic="alone:chance", values=dict.fromkeys((0, 1), told)),)


class EvalNotDeterministic(EventRule):
    """Dropout was active inside a module in eval mode: the same batch gives other outputs each time.

    By a function of torch's, or by hand: noise of a fixed size that is added, a mask of a fixed rate that is multiplied
    by. While training it is looked for in evaluations that go through DDP's forward, or that of the model in one
    process: once one has drawn random numbers, the next tells which module's own code does, and the source of that
    module names the call. What else a model draws (variational and diffusion models, masked inputs) is its own.
    `model.module(x)` and compiled models are not seen; `ddpdebug preflight` runs a batch twice.

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
        lambda: _draws(_CALL),
        lambda: (*steps(2), *_draws(_ATTENTION)),
        lambda: _draws({**_CALL, "active": None}),
        lambda: _draws(_CALL, draws_otherwise=True),
        lambda: _draws(_NOISE, draws_otherwise=True),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: _draws(_CALL, training=True),  # Monte Carlo dropout
        lambda: _draws({**_CALL, "active": None}, draws_otherwise=True),  # the other may have been it
        lambda: Facts(
            topic="alone:chance",
            values={0: {"step": 20, "modules": [{**_MODULE, "calls": [_NOISE]}], "reconstructs": True}},
        ),
        _draws,  # what an older version said of it cannot be read
        lambda: Facts(topic="alone:validation", values={0: {"step": 20, "forwards": 4, "since": 0}}),
    )

    def judge(self, fact: EvalDraws) -> Fields | None:
        found: dict[tuple[str, str | None], tuple[DrawingModule, DropoutCall]] = {}
        for part in fact.modules:
            for call in _culprits(part):
                if fact.reconstructs and not _is_dropout(call):
                    continue  # a denoising auto-encoder
                found.setdefault((call.function, call.location), (part, call))
        if not found:
            return None
        (module, first), *more = list(found.values())[:_MAX_CALLS]
        evidence: dict[str, Any] = {"function": first.function, "class": module.class_name, "mode": "eval"}
        if more:
            evidence["others"] = [f"{call.function} at {call.location}" for _, call in more]
        if first.p is not None:
            evidence["p"] = first.p
        return {"subject": (module.path,), "location": first.location, "evidence": evidence}


def _is_dropout(call: DropoutCall) -> bool:
    return call.function.endswith(("dropout", "dropout1d", "dropout2d", "dropout3d", "attention"))


def _culprits(module: DrawingModule) -> Sequence[DropoutCall]:
    """Return the calls by which a module in eval mode has drawn.

    Those that are certainly active if there are any, else those that may be, unless something else draws as well. A
    part that was put into train mode by itself draws on purpose.
    """
    if module.training:
        return ()
    certain = [call for call in module.calls if call.active]
    return certain or ([] if module.draws_otherwise else module.calls)
