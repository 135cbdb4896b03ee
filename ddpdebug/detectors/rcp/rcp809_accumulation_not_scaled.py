"""RCP809: gradient accumulation is not scaled."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Severity
from ddpdebug.detectors.rcp.habits import WindowHabit
from ddpdebug.schema.details import Accumulation
from ddpdebug.schema.row import Flag

_TWICE = (
    "the loop divides the loss by the accumulation steps, and so does the library's `backward` (Accelerate, a trainer)",
    "two layers of the loop divide: the function that makes the loss and the one that calls backward",
)
_ONCE = ("divide by the number of micro-batches once: leave it to the library, or to the loop",)


class AccumulationNotScaled(WindowHabit):
    """The gradient at the step is the sum over micro-batches of mean losses, and nothing divides it, or two things do.

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
        lambda: (step_at(0), *steps(4, start=1, flags=Flag.MEANS_ADDED | Flag.CLIPPED)),
    )
    silent_on = Examples(
        lambda: (
            steps(6, micro_batches=8),
            steps(3, flags=Flag.MEANS_ADDED),
            *(
                steps(5, flags=Flag.MEANS_ADDED | Flag[other])
                for other in ("NOT_ONE_LINE", "FEWER_FORWARDS", "GRADS_DISCARDED", "GRADS_CARRIED", "GRADS_WRITTEN")
            ),
        )
    )

    def describe(self, about: Accumulation) -> dict[str, Any] | None:
        fields = super().describe(about)
        if about.divided_by is None or fields is None:
            return fields
        return {**fields, "title": "gradient accumulation is scaled twice", "causes": _TWICE, "actions": _ONCE}
