"""NUM301: a module is the first to return something non-finite."""

from __future__ import annotations

import math
from typing import Any

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Step, Verdict
from ddpdebug.detectors.num.nonfinite import (
    ROOT,
    ReplayedRule,
    about,
    call,
    first_call,
    has,
    known_of,
    maker,
    of_loss,
    ranks_with,
    seen,
)
from ddpdebug.detectors.num.num305_nonfinite_input import NonfiniteInput
from ddpdebug.schema.details import Numerics
from ddpdebug.schema.row import Flag

_LOSS: dict[str, Any] = {"value": math.nan, "micro_batch": 0, "backward": "train.py:60", "expression": None}
_CALLS = [call(), call("blocks.1", 4), call("head", 9, input_nonfinite=True)]
_SEEN = {1: seen(loss=_LOSS, forward=_CALLS, output_finite=False)}
_ODD: dict[int, Any] = {1: {"flags": Flag.LOSS_NONFINITE | Flag.FORWARD_NONFINITE}}
_MASK = call("scores", kinds=["-Inf"])
_REPLAY = {"complete": True, "op": "aten.exp.default", "phase": "forward", "module": "body.1", "location": "net.py:9"}


class NonfiniteModuleOutput(ReplayedRule):
    """A module returned nan or inf although its inputs and parameters were finite: the first one of the forward.

    A tensor of -inf that a following softmax consumes is an ordinary mask and is not meant.

    Impact: the loss and all gradients of this rank become nan in this step; the all-reduce hands them to every rank,
    and one optimizer step later no weight is usable.

    Diagnosis: look at the input range in the finding: large values point to overflow, harmless ones to the operation
    itself. Replay the step's bundle with `ddpdebug replay` to reach the operation and the line. Print `x.abs().amax()`,
    `x.dtype` and `torch.is_autocast_enabled()` at the module's entry. For attention count the rows whose mask is fully
    closed; for norms and divisions look for zero variance or a zero denominator.

    Causes:
    - `softmax`: a softmax row that is masked everywhere: a sequence of padding only gives 0/0
    - `sqrt`, `rsqrt`: sqrt of a negative number, or rsqrt of zero: a variance by subtraction, a distance
    - `log`, `log2`, `log10`, `log1p`: log of zero or of a negative number
    - `div`, `reciprocal`: division by zero: a count, a norm, a deviation
    - `float16`: overflow in float16 (above 65504): attention scores, exp, squared norms, the output of a large linear
      layer
    - `exp`, `pow`, `mm`, `bmm`, `addmm`, `mul`: overflow: exp of more than 88, powers and products of numbers that are
      far too large
    - `operands inf`: two infinities that meet: `inf - inf`, `0 * inf`, the maximum of a row that is masked everywhere
    - weights that have already grown too large: the learning rate is too high or clipping is missing
    - a buffer that is uninitialised or non-finite (running statistics, a positional table)

    Remedy:
    - `softmax`: keep one open position in each row, or zero the row afterwards
    - `sqrt`, `rsqrt`: `x.clamp(min=eps)` before the root, or find out why its argument is negative
    - `log`, `log2`, `log10`, `log1p`: `x.clamp(min=eps)` before the log, or `F.log_softmax` and `F.logsigmoid` on
      logits
    - `div`, `reciprocal`: `clamp(min=1)` of a count, an eps added to a norm or a deviation
    - `float16`: run the operation in float32 (`with torch.autocast(device_type, enabled=False): f(x.float())`) or move
      the run to bfloat16; scale attention queries before the product
    - `exp`, `pow`, `mm`, `bmm`, `addmm`, `mul`: subtract the maximum before exp (`torch.softmax`, `logsumexp`), clamp
      or normalise the input
    - `operands inf`: give a row that is masked everywhere a finite value before the operation
    - if inputs grew over many steps, look at HLTH701 and HLTH706 before patching the operation
    """

    code = "NUM301"
    of_call = True
    title = "a module's output is the first non-finite tensor of the forward"
    after = NonfiniteInput
    fires_on = Examples(
        lambda: step_at(7, odd=_ODD, numerics=_SEEN),
        lambda: step_at(7, odd=_ODD, numerics={1: seen(loss=_LOSS, output_finite=False, checked=False)}),
        lambda: step_at(0, world=1, odd={0: _ODD[1]}, numerics={0: _SEEN[1]}),
        lambda: step_at(7, odd=_ODD, numerics={1: seen(loss=_LOSS, output_finite=None, replay=_REPLAY)}),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: step_at(7, odd={1: {"flags": Flag.FORWARD_NONFINITE}}, numerics={1: seen(forward=_CALLS)}),
        lambda: step_at(7, odd=_ODD, flags=Flag.SKIPPED, numerics=_SEEN),
        lambda: step_at(7, odd={1: {"flags": Flag.LOSS_NONFINITE}}, numerics={1: seen(loss=_LOSS, forward=[_MASK])}),
    )

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        known = known_of(step)

        def guilty(rank: int, told: Numerics) -> bool:
            made = first_call(told)
            if has(step, rank, Flag.LOSS_NONFINITE):
                return made is not None or told.output_finite is False or _is_replayed(told)
            # what was masked on its way to the loss comes back in backward
            alone = step.any(Flag.NO_DDP) or len(step.rows) == 1
            lost = has(step, rank, Flag.LOCAL_GRADS_NONFINITE | (Flag.GRADS_NONFINITE if alone else Flag(0)))
            return lost and made is not None and bool(set(made.kinds) - {"-Inf"})

        ranks = ranks_with(step, known, guilty)
        if not ranks:
            return None
        calls = {rank: call for rank in ranks if (call := first_call(known[rank])) is not None}
        if not calls:
            line = of_loss(known, ranks)
            looked = all(known[rank].checked for rank in ranks)
            others = "nothing that the modules in it returned is" if looked else "its modules were not looked at"
            evidence = {"observed": f"what the model returned is non-finite; {others}", **line}
            return Verdict(ranks=ranks, subject=(ROOT,), phase="forward", evidence=evidence)
        earliest = min((call.micro_batch, call.order) for call in calls.values())
        first = tuple(rank for rank, call in calls.items() if (call.micro_batch, call.order) == earliest)
        names = tuple(dict.fromkeys(maker(calls[rank]) for rank in first))
        evidence = {**about(calls[first[0]]), "also_on": [rank for rank in ranks if rank not in first]}
        before = [call.module for call in known[first[0]].forward if call.kinds == ("-Inf",)]
        evidence["minus_inf_before_in"] = before[:4]
        if not step.any(Flag.LOSS_NONFINITE):
            evidence["loss"] = "finite: it was masked on the way, and came back in backward"
        return Verdict(ranks=first, subject=names, phase="forward", evidence=evidence)


def _is_replayed(told: Numerics) -> bool:
    """Whether the model's outputs were not looked at, and a replay says that its forward has made it."""
    replay = told.replay or {}
    return told.output_finite is None and replay.get("phase") == "forward" and bool(replay.get("op"))
