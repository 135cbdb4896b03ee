"""SYNC207: a trainable parameter gets no gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import contract, gradients, step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.detectors.sync.gradients import find_unused, gradient_classes, missing
from ddpdebug.schema.announcements import Failure
from ddpdebug.schema.details import Contract, Gradients
from ddpdebug.schema.row import Flag

#: What torch's reducer raises at the forward after a step in which some gradient never came.
_DDP_MESSAGE = "Expected to have finished reduction"
_UNUSED: dict[str, Any] = {"without_grad": 1, "presence_digest": 77, "gradients": gradients(4, missing=["aux.w"])}
#: What ranks have a gradient for -> these ranks.
_Presence = Mapping[int, frozenset[int]]


#: Where steps before have used the parameters.
_OF_ONE_BATCH: Fields = {
    "causes": ("a branch that this batch does not take on this rank: no image, no such expert, an auxiliary loss off",),
    "actions": ("`find_unused_parameters=True`, or let each forward use the branch: `loss + 0 * branch(x).sum()`",),
}


class ParameterWithoutGradient(Detector):
    """A trainable parameter of the optimizer receives no gradient, in step after step, on some or all ranks.

    Impact: the parameter is not trained. With `find_unused_parameters=False` it also holds up DDP's reduction of its
    whole bucket: gradients of other parameters then stay unreduced without a message.

    Diagnosis: the subject lists the parameters. After `backward()` print those with `p.requires_grad and p.grad is
    None`, and follow their module's output to the loss: it is not called, or its result is not used, or detached.

    Causes:
    - `some ranks only`: a branch that depends on the data, taken on some ranks only
    - `of another model`: the optimizer was built before the parameters were replaced (`fully_shard`, a new layer): it
      holds the old ones
    - a layer or a head that this configuration does not use (auxiliary loss off, pooler of a language model)
    - an output that is computed and not part of the loss, or cut by `detach()` or `no_grad()`
    - a parameter that belongs into another optimizer or should be frozen

    Remedy:
    - `some ranks only`: keep data-dependent branches the same on all ranks, or add `0 * branch.sum()` where the branch
      is not taken
    - `of another model`: build the optimizer last, after `fully_shard` and all changes of the model
    - remove the layer, or `requires_grad_(False)` before wrapping
    - give it a part in the loss, or pass `find_unused_parameters=True` if it is used in some steps only
    """

    code = "SYNC207"
    severity = Severity.WARNING
    title = "a trainable parameter receives no gradient"
    incident = ("subject",)
    reads = ("presence_digest",)
    wants = ("gradients", "contract")
    topics = ("alone",)
    no_gradient_steps = Threshold(
        5,
        "first checked steps in which the same parameters got no gradient",
        source="layers that are dropped at random change from step to step",
    )
    fires_on = Examples(
        lambda: Facts(
            topic="alone:failure",
            values={1: {"reason": f"RuntimeError: {_DDP_MESSAGE} ...", "missing": ["aux.w"], "step": 12}},
        ),
        lambda: Facts(
            topic="alone:failure",
            values={1: {"reason": f"RuntimeError: {_DDP_MESSAGE} ...", "named": ["aux.w"], "step": 8, "raised_in": 13}},
        ),
        lambda: steps(5, **_UNUSED),
        lambda: step_at(
            1,
            without_grad=1,
            odd={1: {"grads_digest": 5}},
            gradients=gradients(4, {1: {"w": "ff"}}, missing=["b"]),
            contract=contract(4),
        ),
    )
    silent_on = Examples(
        lambda: steps(5),
        lambda: steps(4, **_UNUSED),
        lambda: tuple(step_at(n, without_grad=1, presence_digest=70 + n % 3) for n in range(10)),  # layers are dropped
        lambda: steps(5, start=100, **_UNUSED)[:1],
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._seen: dict[int, tuple[_Presence, int]] = {}  # optimizer -> (ranks by what they have, steps)
        self._varies: set[int] = set()
        self._first: dict[int, int] = {}  # optimizer -> the first step that was counted

    def can_show(self, step: Step) -> bool:
        return step.known("presence_digest")

    def suspects(self, step: Step) -> bool:
        if not _lacking(step):
            return False
        return bool(gradient_classes(step)) or self._counted(step)[1] == int(self.no_gradient_steps)

    def detect(self, step: Step) -> Findings:
        if not self.can_show(step) or step.any(Flag.SKIPPED):
            return
        counted = self._counted(step)
        if counted[1] == 0:
            self._varies.add(step.optimizer)
        self._first.setdefault(step.optimizer, step.step)
        self._seen[step.optimizer] = counted
        without = missing(step)
        if gradient_classes(step) and without and step.answers(Contract) and not find_unused(step):
            yield self._report(step, without, "its bucket may never be reduced")
        elif counted[1] == int(self.no_gradient_steps) and _lacking(step) and (without or not step.answers(Gradients)):
            yield self._report(step, without, f"no gradient in {counted[1]} checked steps")

    def compare(self, topic: str, facts: Mapping[int, Any]) -> Findings:
        """Name the parameters when DDP itself ends the run: its own message gives indices at most."""
        for rank, fact in facts.items():
            if not isinstance(fact, Failure) or _DDP_MESSAGE not in fact.reason:
                continue
            if subject := fact.named or fact.missing:  # the step itself may not have been watched; the text knows
                later = _OF_ONE_BATCH if (fact.raised_in or 0) > 2 else {}
                yield self.finding(
                    **later,
                    step=fact.step if not fact.raised_in else fact.raised_in - 1,
                    ranks=(rank,),
                    subject=subject[:MAX_NAMES],
                    evidence={"observed": "DDP ended the run: gradients of the previous step were not all reduced"},
                )

    def _counted(self, step: Step) -> tuple[_Presence, int]:
        """Return who lacks what, and in how many checked steps that has been so; 0 once it has changed."""
        presence = step.groups("presence_digest")
        before, number = self._seen.get(step.optimizer, (presence, 0))
        if step.optimizer in self._varies or before != presence:
            return presence, 0
        return presence, number + 1

    def _report(self, step: Step, without: Mapping[str, list[str]], what: str) -> Finding:
        ranks = _lacking(step)
        names = dict.fromkeys(name for own in without.values() for name in own)
        more: dict[str, Any] = {}
        if len(ranks) < step.world:
            what += ", on some ranks only"
        elif names and all(name.startswith("parameter[") for name in names):
            what += ": the optimizer's parameters are of another model than the one that trains"
            more = {"severity": Severity.ERROR, "step": self._first.get(step.optimizer, step.step)}
        return self.finding(
            step,
            **more,
            ranks=ranks,
            subject=tuple(names)[:MAX_NAMES],
            evidence={
                "observed": what,
                "parameters": {str(rank): step.rows[rank].without_grad for rank in ranks if rank in step.rows},
                "find_unused_parameters": find_unused(step) if step.answers(Contract) else None,
            },
        )


def _lacking(step: Step) -> tuple[int, ...]:
    lacking = {rank for rank, row in step.rows.items() if row.without_grad > 0}
    return tuple(sorted(lacking.union(*(ranks for lowest, ranks in step.kinds.items() if lowest in lacking))))
