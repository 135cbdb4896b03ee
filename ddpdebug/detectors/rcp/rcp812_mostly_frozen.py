"""RCP812: a large part of the model is frozen."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity, Threshold
from ddpdebug.schema.announcements import FrozenParameters

_FACT = {"kind": "frozen", "step": 32, "share": 0.9, "first": 0.9}
_NORMS: Fields = {
    "title": "only normalisation layers train",
    "phase": "norms",
    "causes": (
        "a filter that was meant to freeze the normalisation layers and freezes the others: a `not` too many",
        "the output layer was frozen with the rest and not unfrozen",
        "intended: adaptation of normalisation layers alone",
    ),
    "actions": (
        "print the names of what trains: `[n for n, p in model.named_parameters() if p.requires_grad]`",
        "unfreeze the output layer, and what else shall train, by explicit module",
        "if intended, nothing",
    ),
}
_OUTPUT: Fields = {
    "title": "the output layer is frozen while the layers before it train",
    "phase": "output layer",
    "causes": (
        "a filter that matches the new layer instead of the pre-trained ones: a `not` too many or too few",
        "the layer was made anew after others were unfrozen by name, or frozen by its old name",
        "intended: a classifier that is fixed on purpose",
    ),
    "actions": (
        "print the names of what trains: `[n for n, p in model.named_parameters() if p.requires_grad]`",
        "`requires_grad_(True)` for the output layer, before DDP and optimizer are built",
        "if intended, nothing",
    ),
}


_ATTRIBUTE: Fields = {
    "title": "what was meant to be frozen still trains: an attribute was set that torch does not read",
    "phase": "attribute",
    "causes": (
        "`module.requires_grad = False` makes an attribute that nobody reads: only parameters have one",
        "`requires_grad` of a parameter is spelt in another way: a new attribute, and no error",
    ),
    "actions": ("`module.requires_grad_(False)`, before DDP and optimizer are built",),
}


def _frozen(**more: Any) -> tuple[Facts]:
    return (Facts(topic="alone:audit", values={0: {**_FACT, **more}}),)


class MostlyFrozen(EventRule):
    """The larger part of what the optimizer was built to train has been frozen since, or just what should train.

    Only normalisation layers train, or all but the layer that makes the output. Or what was meant to be frozen trains.

    Impact: if it was not intended, only a small part learns and the result stays far below what the model can do.

    Diagnosis: print the number of trainable parameters per top-level module. Compare with the intention: linear
    probe, adapter, fine-tuning in stages. Look at whether a planned unfreezing has happened, and whether it came
    after the wrapping with DDP, in which case the unfrozen part is not synchronised (SYNC203).

    Causes:
    - intended: linear probe, LoRA, a frozen teacher or backbone inside the module
    - a stage that should have been unfrozen by now and was not
    - a name filter in the freezing code that matches too much
    - a loader or quantisation tool that freezes by default

    Remedy:
    - if not intended, set `requires_grad_(True)` by explicit module, before DDP and optimizer are built; when stages
      change, build both anew
    - if intended, leave it: `ignore` keeps the finding silent, and `torch.no_grad()` around a frozen backbone saves
      time where nothing in it or in front of it trains
    """

    code = "RCP812"
    severity = Severity.WARNING
    title = "a large part of the model is frozen"
    events = ("audit:frozen",)
    frozen_share = Threshold(
        0.5,
        "share of the optimizer's parameters that are frozen in steps 1 and 32",
        source="chosen: the larger part; a stage of a recipe that freezes for a moment is over by step 32",
    )
    fires_on = Examples(
        lambda: Facts(topic="alone:audit", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), Facts(topic="alone:audit", values={1: {**_FACT, "share": 1.0}})),
        lambda: _frozen(share=0.51, first=0.51),
        lambda: _frozen(share=0.0, first=0.0, norms=8),
        lambda: _frozen(share=0.01, first=0.01, output=["head.weight"]),
        lambda: _frozen(share=0.0, first=None, attribute=["backbone"]),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: _frozen(share=0.5),
        lambda: _frozen(first=0.5),
        lambda: Facts(topic="alone:audit", values={0: {**_FACT, "kind": "missing", "orphans": []}}),
    )

    def judge(self, fact: FrozenParameters) -> Fields | None:
        if fact.norms:
            return {**_NORMS, "evidence": {"trainable_parameters_of_normalisation_layers": fact.norms}}
        if fact.output:
            return {**_OUTPUT, "subject": fact.output, "evidence": {"frozen": list(fact.output)}}
        if fact.attribute:
            return {**_ATTRIBUTE, "subject": fact.attribute}
        first = fact.share if fact.first is None else fact.first  # older versions said it of the larger part only
        if min(first, fact.share) <= self.frozen_share:
            return None
        return {"evidence": {"parameters_frozen_since_the_optimizer_was_built": f"{fact.share:.0%}"}}
