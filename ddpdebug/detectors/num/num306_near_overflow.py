"""NUM306: numbers come close to what their 16-bit dtype can hold."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import ComparisonRule, Examples, Findings, RankClasses, Severity, Step
from ddpdebug.detectors.num.nonfinite import BAD, seen
from ddpdebug.schema.details import Numerics
from ddpdebug.schema.row import Flag

_NEAR: dict[str, Any] = {"module": "blocks.3.mlp", "dtype": "float16", "largest": 41000.0, "limit": 65504.0}
_SEEN = {2: seen(near=[{**_NEAR, "history": [[4, 12000.0], [5, 22000.0], [6, 41000.0]]}])}
_ODD: dict[int, Any] = {2: {"flags": Flag.NEAR_OVERFLOW}}


class NearOverflow(ComparisonRule):
    """A magnitude is above half of what the 16-bit dtype can hold (32752 for float16); nothing has overflowed yet.

    Impact: the next growth gives inf. In float16 it ends in skipped steps or nan; precision is already coarse up there
    (the spacing of float16 above 32768 is 32).

    Diagnosis: see whether the maximum grows over steps or appears with single batches. Print `x.abs().amax()` per
    module on the path before the named one and find where the jump happens: residual stream, attention scores before
    softmax, logits. For gradients divide by the loss scale first.

    Causes:
    - a residual stream or logits that grow slowly because nothing bounds them (no final norm, no z-loss, no decay)
    - a model trained in bfloat16 that now runs in float16
    - attention scores without the 1/sqrt(d) factor, or scaled after the product instead of before
    - a loss scale that is too high, or a loss that is summed instead of averaged

    Remedy:
    - run the module in bfloat16, or in float32 with `torch.autocast(device_type, enabled=False)`
    - bound the growth where it starts: normalise queries and keys, scale residual branches at initialisation, clip
      gradients, lower the learning rate
    - for gradients lower `GradScaler(init_scale=...)` or let the scaler back off
    """

    code = "NUM306"
    all_ranks = True
    severity = Severity.WARNING
    title = "activations or gradients are within a factor of two of the dtype's maximum"
    incident = ()
    reads = (Flag.NEAR_OVERFLOW,)
    wants = ("numerics",)
    fires_on = Examples(
        lambda: step_at(6, odd=_ODD, numerics=_SEEN),
        lambda: (step_at(6, world=1, flags=Flag.NEAR_OVERFLOW, numerics={0: _SEEN[2]}), step_at(7)),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: step_at(6, odd=_ODD, flags=Flag.LOSS_NONFINITE, numerics=_SEEN),
        lambda: step_at(6, numerics=_SEEN),
    )

    def rank_classes(self, step: Step) -> RankClasses | None:
        if not step.all(Flag.CHECKED) or step.any(BAD):
            return None
        near = step.ranks_with(Flag.NEAR_OVERFLOW)
        return {rank: rank in near for rank in step.rows} if near else {}

    def wants_all(self, step: Step) -> bool:
        return step.any(Flag.NEAR_OVERFLOW)

    def report(self, step: Step, classes: RankClasses) -> Findings:
        found = {rank: told.near for rank, told in step.answers(Numerics).items() if told.near}
        if not found:
            return
        worst = max((near for own in found.values() for near in own), key=lambda n: n.largest / n.limit)
        names = dict.fromkeys([worst.module, *(near.module for own in found.values() for near in own)])
        yield self.finding(
            step,
            ranks=tuple(sorted(found)),
            subject=tuple(names)[:MAX_NAMES],
            phase="gradient" if worst.module.startswith("gradient of ") else "forward",
            evidence={
                "largest": worst.largest,
                "limit": worst.limit,
                "dtype": worst.dtype,
                "history": [f"step {at}: {largest:.4g}" for at, largest in worst.history],
            },
        )
