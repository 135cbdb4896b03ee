"""SYNC206: gradients were changed by each rank for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpdebug.detectors.base import Examples
from ddpdebug.detectors.comparison import tables
from ddpdebug.detectors.examples import contract, gradients, step_at
from ddpdebug.detectors.sync.gradients import GradientRule, clip_factors, clip_location, symptom
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step, outvoted

#: Relative distance below which two factors count as equal.
_SAME_FACTOR = 0.01
_EQUAL_SUMS: dict[str, Any] = {"reduced_sums": {"w": 0.5, "b": 0.1}}
_CLIP: dict[str, Any] = {"clip_norm": 4.0, "clip_max": 1.0}
_OWN_CLIP: dict[int, Any] = {rank: {"clip_norm": 1.0 + rank} for rank in range(4)}


class ChangedAfterReduction(GradientRule):
    """Gradients were equal after their reduction and are not at the step, or were scaled by each rank before it.

    Impact: scaling after the reduction makes the ranks part. Clipping or scaling a rank's own gradients before it
    leaves the ranks equal, but the result is no longer the gradient of the global batch: ranks with hard samples
    lose weight.

    Diagnosis: `ratio` is the factor that each rank applied. Look for code between `loss.backward()` and
    `optimizer.step()` that reads or writes `p.grad`; with accumulation also for clipping inside `no_sync()`.

    Causes:
    - clipping with a limit or a norm that differs between ranks, or on one rank only
    - gradients zeroed, masked or replaced (`nan_to_num_`, outlier guards) on the rank that saw the bad batch
    - gradients divided by this rank's own number of tokens or samples after the all-reduce
    - `clip_grad_norm_` called on each micro-batch, or before a manual all-reduce
    - noise added to gradients from each rank's own generator

    Remedy:
    - clip once, right before the step, after the last synchronised backward, with the same limit on all ranks
    - decide about skipping or masking together: all-reduce the flag, then do the same on all ranks
    - put per-rank weights into the loss, before `backward()`, so that the average is right
    """

    code = "SYNC206"
    severity = Severity.ERROR
    title = "gradients were changed by some ranks for themselves"
    follows = ("RANK105", "RANK109", "RANK112", "SYNC202", "SYNC203", "SYNC205", "SYNC208", "SYNC211")
    fires_on = Examples(
        lambda: (
            (
                step_at(
                    6,
                    odd={2: {"grads_digest": 5}},
                    gradients=gradients(4, {2: {"w": "ff"}}, **_EQUAL_SUMS),
                    contract=contract(4),
                ),
            ),
            (
                step_at(
                    6,
                    odd={2: {"grads_digest": 5, "clip_max": 0.1}},
                    flags=Flag.CLIPPED,
                    **_CLIP,
                    gradients=gradients(4, {2: {"w": "ff", "b": "ff"}}, **_EQUAL_SUMS),
                    contract=contract(4),
                ),
            ),
            (
                step_at(
                    6, flags=Flag.CLIPPED | Flag.CLIPPED_BEFORE_SYNC, clip_max=1.0, odd=_OWN_CLIP, contract=contract(4)
                ),
            ),
        )
    )
    silent_on = Examples(
        lambda: (
            (step_at(6, flags=Flag.CLIPPED, **_CLIP),),
            (step_at(6, flags=Flag.CLIPPED | Flag.CLIPPED_BEFORE_SYNC, **_CLIP),),
            (step_at(6, odd={2: {"grads_digest": 5}}, gradients=gradients(4, {2: {"w": "ff"}}), contract=contract(4)),),
        )
    )

    def suspects(self, step: Step) -> bool:
        return bool(symptom(step)) or bool(_own_factors(step))

    def detect(self, step: Step) -> Iterator[Finding]:
        yield from super().detect(step)
        factors = _own_factors(step)
        if factors and not symptom(step) and not step.any(Flag.LOCAL_ONLY):
            yield self.finding(
                step=step.step,
                ranks=outvoted({rank: round(factor, 3) for rank, factor in factors.items()}),
                subject=(),
                phase="before-reduction",
                location=clip_location(step),
                evidence={
                    "ratio": {str(rank): factor for rank, factor in factors.items()},
                    "clip_norm": {str(rank): row.clip_norm for rank, row in step.rows.items()},
                    "hooks": sorted({str(t["hook"]) for t in tables(step, "contract").values() if t.get("hook")}),
                },
            )


def _own_factors(step: Step) -> dict[int, float]:
    """Return each rank's clipping factor, when these were applied before the reduction and differ."""
    factors = clip_factors(step) if step.any(Flag.CLIPPED_BEFORE_SYNC) and len(step.rows) > 1 else {}
    return factors if factors and max(factors.values()) - min(factors.values()) > _SAME_FACTOR else {}
