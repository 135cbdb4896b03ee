"""NUM302: the loss function makes what is non-finite."""

from __future__ import annotations

import math
from typing import Any

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Step, Verdict
from ddpdebug.detectors.num.nonfinite import (
    NOTHING,
    NonfiniteRule,
    Replay,
    ReplayedRule,
    has,
    known_of,
    of_loss,
    operation,
    ranks_with,
    seen,
)
from ddpdebug.detectors.num.num301_nonfinite_module_output import NonfiniteModuleOutput
from ddpdebug.schema.details import LossBackward, NonfiniteLoss as Loss, Numerics
from ddpdebug.schema.row import Flag

_LOSS: dict[str, Any] = {"value": math.inf, "micro_batch": 0, "backward": "train.py:60", "expression": "train.py:58"}
_ODD: dict[int, Any] = {1: {"flags": Flag.LOSS_NONFINITE}}
_BACKWARD: dict[int, Any] = {1: {"flags": Flag.LOCAL_GRADS_NONFINITE | Flag.GRADS_NONFINITE}}
_ROOT = {"operation": "SqrtBackward0", "value": "nan", "operands": [], "location": "loss.py:12"}
_ENTRY = {"finite": False, "range": [-math.inf, 0.0]}


class NonfiniteLoss(ReplayedRule):
    """The nan or inf arises between the model's output, which is finite, and the number on which backward is called.

    Where the model's outputs were not looked at, because the step was not checked in full, the title says so: then the
    model may have made it as well.

    Phase `loss`: the loss itself is non-finite. Phase `loss-backward`: the loss is finite, and the gradient that it
    gives to the model's output is not.

    Impact: backward fills every gradient with nan on this rank and the all-reduce gives it to all ranks.

    Diagnosis: open the loss expression at the named line and print each term. Count the valid targets (`(labels ==
    ignore_index).sum()` against `labels.numel()`), the empty selections, and the sum of weights that divides. Print the
    dtype in which the loss is computed and the range of logits and targets. With only one rank affected, its batch is
    the evidence.

    Causes:
    - `loss-backward`: the derivative at 0 of sqrt, of a hand-written norm, or of a power below 1; that of log, acos or
      a division near its limit; also in the unselected branch of `torch.where`
    - `not by the model`: nan in labels, weights or whatever else meets the model's output without passing through the
      model
    - `mean`, `nll_loss`: a mean over nothing: all labels of the batch are `ignore_index`, or a boolean selection is
      empty
    - `log`, `log2`, `log10`: `torch.log` of a probability that is exactly 0
    - `div`, `reciprocal`, `std`, `var`: a division by a count, a norm or a weight sum that is 0; std of a single
      element
    - `float16`: a loss computed in float16: exp, a square or a sum over many elements overflows
    - `pow`, `exp`, `mul`, `mse_loss`: predictions that have grown until the loss overflows: learning rate too high, no
      clipping
    - two infinities of opposite sign that meet: `inf - inf`, `0 * inf` in a masked term

    Remedy:
    - `loss-backward`: put an eps under the root, or use `torch.linalg.vector_norm`, whose gradient at 0 is 0; clamp the
      argument before the operation, also where `torch.where` does not use the result
    - `not by the model`: drop or repair what has no valid labels, weights or targets in the dataset
    - `mean`, `nll_loss`, `div`, `reciprocal`, `std`, `var`: use `reduction="sum"` and divide by `count.clamp(min=1)`; a
      batch without targets then contributes a zero that still has a gradient, so that DDP's ranks stay together
    - `log`, `log2`, `log10`: give logits to `F.cross_entropy` or `F.binary_cross_entropy_with_logits` instead of taking
      log of probabilities
    - `float16`: compute the loss with `logits.float()`
    - `pow`, `exp`, `mul`, `mse_loss`: lower the learning rate or warm it up, clip gradients, and look at HLTH701
    - select before the computation instead of multiplying by a mask afterwards
    """

    code = "NUM302"
    of_call = True
    title = "the model's outputs are finite, the loss is not"
    after = NonfiniteModuleOutput
    fires_on = Examples(
        lambda: step_at(7, odd=_ODD, numerics={1: seen(loss=_LOSS)}),
        lambda: step_at(7, odd=_BACKWARD, numerics={1: seen(entry=_ENTRY, local=["head.weight"])}),
        lambda: step_at(7, odd=_BACKWARD, numerics={1: seen(entry=None, loss_backward=_ROOT, local=["head.weight"])}),
        lambda: step_at(7, odd=_ODD),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: step_at(7, odd=_ODD, numerics={1: seen(loss=_LOSS, output_finite=False)}),
        lambda: step_at(7, flags=Flag.SKIPPED | Flag.LOSS_NONFINITE),
        lambda: step_at(7, odd=_BACKWARD, numerics={1: seen(local=["head.weight"])}),
    )

    def replayed(self, verdict: Verdict, replay: Replay) -> Verdict:
        if verdict.title is None:  # the model has made finite numbers, and the loss expression is known better
            return NonfiniteRule.replayed(self, verdict, replay)
        return super().replayed(verdict, replay)

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        known = known_of(step)
        ranks = step.ranks_with(Flag.LOSS_NONFINITE)
        phase, evidence = "loss", of_loss(known, ranks)
        title = None
        if ranks and not any(known.get(rank, NOTHING).output_finite for rank in ranks):
            title = "the loss is non-finite: the model has made it, or the loss expression"
            evidence["observed"] = "the model's outputs were not looked at in this step; --every-step looks at all"
        told = [known[rank] for rank in ranks if rank in known]
        made: list[Loss | LossBackward] = [own.loss for own in told if own.loss]
        lines = [own.loss.expression for own in told if own.loss]
        if not ranks:
            spoilt = Flag.LOCAL_GRADS_NONFINITE | Flag.GRADS_NONFINITE
            ranks = ranks_with(step, known, lambda rank, own: has(step, rank, spoilt) and _is_spoilt_by_loss(own))
            phase = "loss-backward"
            told = [known[rank] for rank in ranks]
            made, lines = [own.loss_backward for own in told if own.loss_backward], [own.loss_line for own in told]
            evidence = operation(next((entry for entry in made if entry.operation), None))
            title = "the loss is finite, the gradient that it gives to the model's output is not"
        if not ranks:
            return None
        evidence["gradient_from_loss"] = next((list(own.entry.range) for own in told if own.entry), None)
        calls = [call for own in told for call in own.forward]
        if any(call.kinds for call in calls):
            evidence["masked_in"] = [call.module for call in calls][:4]
        line = next((entry.location for entry in made if entry.location), None)
        whole = next(filter(None, lines), None)
        how = evidence.pop("line_found")
        evidence |= {"loss_at": whole if line and whole != line else None, "line_found": how}
        return Verdict(
            ranks=ranks, subject=("loss",), phase=phase, location=line or whole, evidence=evidence, title=title
        )


def _is_spoilt_by_loss(told: Numerics) -> bool:
    return (told.entry is not None and not told.entry.finite) or told.loss_backward is not None
