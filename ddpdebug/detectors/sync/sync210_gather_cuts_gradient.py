"""SYNC210: an all_gather in the forward or the loss cuts the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.kinds import Detector, Examples, Facts, Findings, Severity
from ddpdebug.schema.announcements import Gathered

_FACT: dict[str, Any] = {"location": "loss.py:31", "shapes": [[32, 128]]}


class GatherCutsGradient(Detector):
    """`all_gather` was called with a tensor that requires grad, and its outputs, which carry no gradient, were used.

    Impact: the loss looks right and its value is right, but no gradient flows through what was gathered: a
    contrastive loss then trains on half of its terms, and scaling up the batch brings less than it should.

    Diagnosis: at the named line check `gathered[0].requires_grad` (False) and `tensor.requires_grad` (True), and
    whether the loss uses the gathered list as it is.

    Causes:
    - `torch.distributed.all_gather` instead of the differentiable form, in a contrastive or metric-learning loss
    - the own slot of the gathered list is not replaced by the local tensor
    - a custom gather function without a backward

    Remedy:
    - use `torch.distributed.nn.functional.all_gather(tensor)`, whose backward reduces the gradients
    - or put the local tensor back: `gathered[rank] = tensor`, and mind the factor of the world size in DDP's mean
    - if no gradient is meant to flow, gather `tensor.detach()`, which says so
    """

    code = "SYNC210"
    severity = Severity.ERROR
    title = "a gather in the forward or the loss cuts the gradient"
    incident = ("location",)
    topics = ("gathered",)
    fires_on = Examples(
        lambda: Facts(topic="gathered:0", values={0: _FACT, 1: _FACT}),
        lambda: Facts(topic="gathered:1", values={0: {"location": None, "shapes": [[8, 16]]}, 1: None}),
    )
    silent_on = Examples(
        lambda: Facts(topic="gathered:0", values={0: None, 1: None}),
        lambda: Facts(topic="gathered:0", values={0: {}}),
    )

    def compare(self, topic: str, facts: Mapping[int, Gathered]) -> Findings:
        found = {rank: fact for rank, fact in facts.items() if fact.shapes}
        if not found:
            return
        first = next(iter(found.values()))
        yield self.finding(
            step=self.next_step,
            ranks=tuple(found),
            subject=tuple(f"tensor of shape {shape}" for shape in first.shapes),
            location=first.location,
            evidence={"call": "all_gather", "requires_grad": True},
        )
