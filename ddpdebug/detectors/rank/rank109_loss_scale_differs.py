"""RANK109: the gradient scalers of the ranks disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from ddpdebug.detectors.comparison import replica_groups
from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import ComparisonRule, Examples, Findings, RankClasses, Severity, Step
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import outvoted

_AMP: dict[str, Any] = {"loss_scale": 65536.0}


class LossScaleDiffers(ComparisonRule):
    """Under automatic mixed precision the loss scale differs between ranks, or some ranks skip a step that others take.

    Impact: a rank that skips keeps its old parameters and optimizer state while the others move on. Unequal scales
    mean that gradients are averaged in different units and divided by the wrong number.

    Diagnosis: print `scaler.get_scale()` on every rank before `scaler.step(optimizer)`. If the scales are equal and a
    rank skips alone, its gradients hold an inf or NaN that the other ranks do not have: something wrote it after the
    reduction, or the reduction did not happen.

    Causes:
    - `scale`: `GradScaler(init_scale=...)` or its state restored differently per rank
    - `scale`: `scaler.update(new_scale)` with a number that only this rank knows
    - `skip`: gradients changed on one rank between `backward()` and `scaler.step` (a guard that writes inf, own
      clipping)
    - gradients that are not synchronised, so that an overflow stays on the rank that made it

    Remedy:
    - `scale`: make one scaler per process with the same arguments, restore its state on all ranks
    - `skip`: leave gradients alone after the reduction, or do the same to them on all ranks
    - decide to skip together: `dist.all_reduce(found_inf, op=ReduceOp.MAX)` before `scaler.step`
    """

    code = "RANK109"
    severity = Severity.CRITICAL
    title = "loss scale or skipped steps differ between ranks"
    titles: ClassVar[Mapping[str, str]] = {
        "scale": "the loss scale differs between ranks",
        "skip": "some ranks skip a step that others take",
    }
    reads = ("loss_scale", Flag.SKIPPED)
    of_several = True
    incident = ()  # a rank that skips alone has another scale afterwards
    fires_on = Examples(
        lambda: (step_at(26, **_AMP), step_at(27, odd={1: {"flags": Flag.SKIPPED}}, **_AMP)),
        lambda: step_at(0, world=2, odd={1: {"loss_scale": 32768.0}}, **_AMP),
    )
    silent_on = Examples(
        lambda: steps(3, **_AMP),
        lambda: (step_at(0, flags=Flag.SKIPPED, **_AMP), step_at(1, loss_scale=32768.0)),
        lambda: step_at(0, odd={1: {"loss_scale": math.nan}}, **_AMP),
    )

    def rank_classes(self, step: Step) -> RankClasses | None:
        if len(step.rows) < 2 or len(replica_groups(step)) > 1:
            return None
        scales = {row.loss_scale for row in step.rows.values() if math.isfinite(row.loss_scale)}
        skipped = step.any(Flag.SKIPPED) and not step.all(Flag.SKIPPED)
        if len(scales) < 2 and not skipped:
            return {} if scales else None
        usual = max(sorted(scales), default=0.0)
        return {
            rank: (row.loss_scale if math.isfinite(row.loss_scale) else usual, row.has(Flag.SKIPPED))
            for rank, row in step.rows.items()
        }

    def report(self, step: Step, classes: RankClasses) -> Findings:
        scales = {rank: row.loss_scale for rank, row in step.rows.items() if math.isfinite(row.loss_scale)}
        apart = len(set(scales.values())) > 1
        skipped = step.ranks_with(Flag.SKIPPED)
        alone = {rank: rank in skipped for rank in step.rows}
        yield self.finding(
            step,
            ranks=outvoted(scales) if apart else outvoted(alone) if len(step.rows) > 2 else skipped,
            subject=("loss scale",) if apart else ("skipped step",),
            phase="scale" if apart else "skip",
            evidence={"scales": {str(r): s for r, s in scales.items()}, "skipped_on": list(skipped)},
        )
