"""RCP809: gradient accumulation is not scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Facts, Fields, Findings, Severity, Step, Threshold
from ddpdebug.detectors.rcp.habits import WindowHabit
from ddpdebug.schema.announcements import Announcement, LossSettings
from ddpdebug.schema.details import Accumulation
from ddpdebug.schema.row import Flag

_OLDEST = "twice"  # has no phase: incidents of runs that were kept are known without
_SAID: dict[str, Fields] = {
    "twice": {
        "title": "gradient accumulation is scaled twice",
        "causes": (
            "the loop divides the loss by the accumulation steps, and the library's `backward` does (Accelerate)",
            "two layers of the loop divide: the function that makes the loss and the one that calls backward",
        ),
        "actions": ("divide by the number of micro-batches once: leave it to the library, or to the loop",),
    },
    "ranks": {
        "title": "the loss is scaled by the number of ranks",
        "causes": (
            "the loss is divided or multiplied by the world size, and DDP averages over the ranks already",
            "a recipe for gradients that are summed over ranks, with DDP, which averages them",
        ),
        "actions": ("leave the loss as it is: DDP divides the sum of the gradients by the number of ranks",),
    },
    "labels of all": {
        "title": "the loss is divided by the labels of all ranks, and averaged over the ranks again",
        "causes": (
            "the sum over a rank's labels is divided by their number on all ranks, as if gradients were added up",
            "the trainer's multiplication by the number of ranks was left out or replaced",
        ),
        "actions": ("multiply the loss by the world size: DDP divides the sum of the gradients by it",),
    },
    "summed": {
        "causes": (
            "`set_gradient_divide_factor` of a recipe whose loss is divided by the tokens of all ranks",
            "the factor is another number than that of the ranks that reduce (a mesh that was changed)",
            "intended: the learning rate allows for it",
        ),
        "actions": (
            "leave the factor as it is: FSDP2 divides by the number of ranks",
            "or divide the loss by what all ranks have together: `reduction='sum'` over their tokens",
        ),
    },
    "other number": {
        "title": "the loss is not divided by the number of micro-batches of the step",
        "causes": (
            "the number that divides the loss is an older setting, or another one than the loop counts by",
            "intended: a loss of one term with a weight of its own",
        ),
    },
    "uneven": {
        "title": "micro-batches of different size have the same weight",
        "causes": (
            "each micro-batch averages over its own labels, and these means are averaged",
            "padding and ignored labels leave very different numbers in the micro-batches",
        ),
        "actions": ("sum over all labels, divide by their number in the step on all ranks, multiply by the ranks",),
    },
}


def _divided(passes: int, divisor: float, **more: Any) -> tuple[Step, ...]:
    about = {"micro_batches": passes, "divided_by": divisor, **more}
    return steps(6, flags=Flag.MEANS_ADDED, recipe={r: {"accumulation": about} for r in range(4)})


def _shares(step: int, *shares: float) -> Facts:
    settings = {rank: {"step": step + 1, "share": share, "counted": step} for rank, share in enumerate(shares)}
    return Facts(topic="loss_settings:0", values=settings)


class AccumulationNotScaled(WindowHabit):
    """The gradient at the step is the sum over micro-batches of mean losses, and nothing divides it, or two things do.

    Or what divides it is another number than that of the micro-batches, or the number of ranks, over which DDP
    averages; or FSDP2 is told to divide by another number than that of the ranks; or each mean is over very different
    numbers of labels, which then count differently.

    Impact: a sum over K micro-batches is K times the mean: SGD takes K times the step, clipping acts always; Adam
    hides the factor except through eps and clipping. A mean of means gives tokens in short micro-batches too much
    weight.

    Diagnosis: compare the gradient norm at the step with that after the first micro-batch: about K times for
    aligned gradients, or about sqrt(K) when noise dominates, means a sum. Print the number of valid tokens per
    micro-batch. Check whether a trainer already divides before dividing as well.

    Causes:
    - `loss.backward()` without `loss / accumulation_steps`
    - a division by K although the last window of the epoch holds fewer micro-batches
    - a mean over the tokens of each micro-batch where the batch's mean over tokens was meant
    - division twice: in the loop and in the framework

    Remedy:
    - divide by the number of micro-batches in this window
    - for variable length use `reduction="sum"` and divide by the tokens of the whole window over all ranks; since
      DDP averages, multiply by the world size
    - step and clear at the end of the epoch's last, shorter window as well, or drop it
    """

    code = "RCP809"
    severity = Severity.WARNING
    title = "gradient accumulation is not scaled"
    flag = Flag.MEANS_ADDED
    #: Losses of several terms, one forward for several losses, gradients that did not add up, a division by hand.
    unless = Flag.NOT_ONE_LINE | Flag.FEWER_FORWARDS | Flag.GRADS_DISCARDED | Flag.GRADS_CARRIED | Flag.GRADS_WRITTEN
    key = "accumulation"
    topics = ("loss_settings",)
    uneven_counts = Threshold(
        2,
        "multiple of the smallest micro-batch's labels that the largest has in a step",
        source="chosen: sorted or padded texts differ by tens of percent, and weights by less than their noise",
    )
    shares_rounding = Threshold(
        1e-5, "by which the ranks' shares of all labels may differ from one in their sum", source="that of float32"
    )
    shares_steps = Threshold(
        2, "steps in which they add up to one", source="numbers of labels differ from step to step: once is chance"
    )
    fires_on = Examples(
        lambda: steps(
            4,
            flags=Flag.MEANS_ADDED,
            recipe={r: {"accumulation": {"micro_batches": 8, "divided_by": 64.0}} for r in range(4)},
        ),
        lambda: steps(
            4,
            flags=Flag.MEANS_ADDED,
            recipe={r: {"accumulation": {"micro_batches": 8, "location": "train.py:50"}} for r in range(4)},
        ),
        lambda: _divided(1, 4.0, ranks=4),
        lambda: steps(
            4, flags=Flag.MEANS_ADDED, recipe={0: {"accumulation": {"micro_batches": 1, "ranks": 4, "reduced_by": 1.0}}}
        ),
        lambda: _divided(8, 2.0, classes=True),
        lambda: _divided(4, 4.0, counts=[100, 900]),
        lambda: (step_at(0), *steps(4, start=1, flags=Flag.MEANS_ADDED | Flag.CLIPPED)),
        lambda: (_shares(15, 0.4, 0.6), _shares(19, 0.55, 0.45)),
    )
    silent_on = Examples(
        lambda: (
            steps(6, micro_batches=8),
            steps(3, flags=Flag.MEANS_ADDED),
            _divided(1, 2.0, ranks=2),  # half of a square
            _divided(1, 0.5, ranks=4),
            _divided(8, 2.0),
            _divided(4, 4.0, counts=[600, 900]),
            *(
                steps(5, flags=Flag.MEANS_ADDED | Flag[other])
                for other in ("NOT_ONE_LINE", "FEWER_FORWARDS", "GRADS_DISCARDED", "GRADS_CARRIED", "GRADS_WRITTEN")
            ),
        ),
        lambda: _shares(15, 0.4, 0.6),  # once is chance
        lambda: (_shares(15, 0.5, 0.5), _shares(19, 0.5, 0.5)),  # a loss with a weight of a half
        lambda: (_shares(15, 0.8, 1.2), _shares(19, 1.1, 0.9)),  # multiplied by the number of ranks
        lambda: (_shares(15, 0.5, 0.4), _shares(19, 0.4, 0.4)),  # divided by the length of padded texts
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        #: By loss: steps whose shares add up to one, and these shares.
        self._divided: dict[str, tuple[list[int], set[float]]] = {}
        self._said: set[str] = set()

    def compare(self, topic: str, facts: Mapping[int, Announcement]) -> Findings:
        told = {rank: fact for rank, fact in facts.items() if isinstance(fact, LossSettings)}
        shares = [fact.share for fact in told.values() if fact.share is not None]
        steps = {fact.counted for fact in told.values()}
        if len(shares) != len(told) or len(told) < 2 or len(steps) > 1:
            return
        if math.isclose(math.fsum(shares), 1.0, rel_tol=self.shares_rounding):
            known, seen = self._divided.setdefault(topic, ([], set()))
            known += [step for step in steps if step is not None]
            seen.update(shares)
            if len(known) >= self.shares_steps and len(seen) > 1 and topic not in self._said:  # no weight of the loss's
                self._said.add(topic)
                first = told[min(told)]
                shown = {str(rank): round(fact.share or 0.0, 4) for rank, fact in told.items()}
                yield self.finding(
                    step=known[0],
                    ranks=tuple(told),
                    location=first.location,
                    phase="labels of all",
                    evidence={"share_of_the_labels": shown},
                    **_SAID["labels of all"],
                )

    def describe(self, about: Accumulation) -> dict[str, Any] | None:
        if (about.divided_by or 1.0) == 1 and about.micro_batches > 1 and about.reduced_by is None:
            return super().describe(about)
        if (phase := self._phase(about)) is None:
            return None
        own = {} if phase == _OLDEST else {"phase": phase}
        if about.reduced_by is not None and about.ranks:
            own["title"] = f"gradients are {about.ranks / about.reduced_by:g} times the mean over the ranks"
            shown = {"ranks": about.ranks, "sum_divided_by": about.reduced_by}
            return {"location": about.location, "evidence": shown, **own, **_SAID[phase]}
        return {**(super().describe(about) or {}), **own, **_SAID[phase]}

    def _phase(self, about: Accumulation) -> str | None:
        if about.reduced_by is not None:
            return "summed"
        passes, divisor, ranks = about.micro_batches, about.divided_by or 1.0, about.ranks or 1
        if divisor == passes * passes and passes > 2:  # of two, a fourth is more often a weight
            return "twice"
        # what squares are multiplied by is more often a half than one of two ranks
        if divisor in {passes * ranks, passes / ranks} and (ranks > 2 or (ranks == 2 and about.classes)):
            return "ranks"
        if about.classes and 1 < divisor < passes and divisor == int(divisor):
            return "other number"
        least, most = about.counts or (1.0, 1.0)
        return "uneven" if divisor == passes > 1 and most >= self.uneven_counts * least else None
