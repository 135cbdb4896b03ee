"""NUM308: something non-finite arose in the forward, and the loss does not show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import ComparisonRule, Examples, Findings, RankClasses, Severity, Step
from ddpdebug.detectors.num.nonfinite import BAD, about, call, first_call, maker, seen
from ddpdebug.schema.details import Numerics
from ddpdebug.schema.row import Flag

# What counts, chosen for few false alarms: NaN or +Inf in the output of a module. -Inf alone does not: it is what masks
# are made of, and nothing tells them from an accident. Nor does anything in a step whose input batch holds NaN: a model
# that is given NaN-coded missing values handles them on purpose.
_ON_PURPOSE = Flag.INPUT_NONFINITE | Flag.SKIPPED
_ODD: dict[int, Any] = {1: {"flags": Flag.FORWARD_NONFINITE}}
_MASKED = {"op": "aten.div.Tensor", "location": "model.py:30", "operands": [], "ended_at": "aten.nan_to_num.default"}
_SEEN = {1: seen(forward=[call(), call("blocks.1", 4, input_nonfinite=True)])}


class MaskedNonfinite(ComparisonRule):
    """A module returned nan or +inf, and something later replaced it (`nan_to_num`, `where`): the loss is finite.

    Impact: the forward looks healthy, but backward still passes through the operation that failed, and its gradient may
    become nan at any step. The masked samples train on a constant.

    Diagnosis: go to the named module and its input range, then to the first masking operation after it. Print the share
    of elements that were replaced, per step and per rank. Run the step's bundle under
    `torch.autograd.set_detect_anomaly(True)`: if it raises, backward is already affected. A mask of -inf before softmax
    is ordinary.

    Causes:
    - a patch for an earlier nan: `nan_to_num` on an output instead of a repair of its cause
    - log, sqrt or division evaluated on all elements and selected afterwards
    - a fully masked attention row whose nan is zeroed later
    - float16 overflow to inf that a clamp brings back

    Remedy:
    - move the protection in front of the operation: `torch.log(x.clamp(min=eps))`, `torch.where(mask, x, 1.0)` before
      the division, an eps under the root
    - remove the mask afterwards and see that nothing arrives
    - note that clamp lets nan through and `nan_to_num` does not stop nan gradients
    """

    code = "NUM308"
    severity = Severity.WARNING
    title = "a non-finite value arose and was masked"
    incident = ("subject",)
    reads = (Flag.FORWARD_NONFINITE,)
    wants = ("numerics",)
    fires_on = Examples(
        lambda: step_at(7, odd=_ODD, numerics=_SEEN),
        lambda: step_at(7, odd=_ODD, numerics={1: seen(forward=[call()], replay={"masked": _MASKED, "bundle": "b"})}),
        lambda: (step_at(7, odd=_ODD, numerics=_SEEN), step_at(8, odd=_ODD, numerics=_SEEN)),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: step_at(7, odd=_ODD, flags=Flag.INPUT_NONFINITE, numerics=_SEEN),
        lambda: step_at(7, odd={1: {"flags": Flag.FORWARD_NONFINITE | Flag.LOSS_NONFINITE}}, numerics=_SEEN),
        lambda: step_at(7, numerics={1: seen(forward=[call(kinds=["-Inf"])])}),
    )

    def rank_classes(self, step: Step) -> RankClasses | None:
        if not step.all(Flag.CHECKED) or step.any(BAD | _ON_PURPOSE):
            return None
        masked = step.ranks_with(Flag.FORWARD_NONFINITE)
        return {rank: rank in masked for rank in step.rows} if masked else {}

    def report(self, step: Step, classes: RankClasses) -> Findings:
        known = step.answers(Numerics)
        calls = {rank: found for rank, told in known.items() if (found := first_call(told)) is not None}
        if not calls:
            return
        first = next(iter(calls.values()))
        names = dict.fromkeys(maker(found) for found in calls.values())
        replay: Mapping[str, Any] = next((own for rank in calls if (own := known[rank].replay)), {})
        masked = replay.get("masked") or {}
        evidence = {"operation": masked.get("op"), "masked_by": masked.get("ended_at")}
        evidence |= {"operands": masked.get("operands"), **about(first)}
        evidence |= {"loss": {str(rank): step.rows[rank].loss for rank in calls}, "bundle": replay.get("bundle")}
        yield self.finding(
            step,
            ranks=tuple(sorted(calls)),
            subject=tuple(names)[:MAX_NAMES],
            phase="forward",
            location=masked.get("location"),
            evidence={name: value for name, value in evidence.items() if value not in (None, [])},
        )
