"""SYNC206: gradients were changed on some ranks after the all-reduce."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from ddpdebug.detectors.comparison import culprits
from ddpdebug.detectors.examples import contract, gradients, step_at
from ddpdebug.detectors.kinds import Examples, Findings, RankClasses, Severity, Step, Threshold, Verdict
from ddpdebug.detectors.sync.gradients import (
    GRADIENT_COLUMNS,
    GradientRule,
    clip_factors,
    clip_location,
    differing,
    gradient_classes,
    hooks,
    odd_ranks,
)
from ddpdebug.detectors.sync.sync205_unsynchronised_accumulation import UnsynchronisedAccumulation
from ddpdebug.schema.details import Gradients
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import outvoted

#: The norm of a gradient is taken twice, nearly always by the same kernel: equal elements give equal norms.
_UNCHANGED = 1e-6
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
    - `clipping`: clipping with a limit or a norm that differs between ranks, or on one rank only
    - `before-reduction`: `clip_grad_norm_` called on each rank's own gradients before a manual all-reduce, or on each
      micro-batch
    - gradients zeroed, masked or replaced (`nan_to_num_`, outlier guards) on some ranks only, or by a mask of each
      rank's own
    - gradients divided by this rank's own number of tokens or samples after the all-reduce
    - noise added to gradients from each rank's own generator

    Remedy:
    - `clipping`, `before-reduction`: clip once, right before the step, after the last synchronised backward, with the
      same limit on all ranks
    - do to the gradients the same on all ranks: broadcast the mask, the flag or the seed first
    - put per-rank weights into the loss, before `backward()`, so that the average is right
    """

    code = "SYNC206"
    all_ranks = True
    severity = Severity.ERROR
    title = "gradients were changed on some ranks only"
    titles: ClassVar[Mapping[str, str]] = {
        "before-reduction": "each rank clips its own gradients before they are averaged",
        "clipping": "gradients are clipped differently on each rank",
    }
    after = UnsynchronisedAccumulation
    clip_factors_apart = Threshold(
        0.01,
        "difference between the ranks' clipping factors that makes a finding",
        source="chosen: ranks that clip by the same norm differ by rounding, ranks that clip their own by much more",
    )
    fires_on = Examples(
        lambda: step_at(
            6,
            odd={2: {"grads_digest": 5}},
            gradients=gradients(4, {2: {"w": "ff"}}, **_EQUAL_SUMS),
            contract=contract(4),
        ),
        lambda: step_at(
            6,
            odd={2: {"grads_digest": 5, "clip_max": 0.1}},
            flags=Flag.CLIPPED,
            **_CLIP,
            gradients=gradients(4, {2: {"w": "ff", "b": "ff"}}, **_EQUAL_SUMS),
            contract=contract(4),
        ),
        lambda: step_at(
            6, flags=Flag.CLIPPED | Flag.CLIPPED_BEFORE_SYNC, clip_max=1.0, odd=_OWN_CLIP, contract=contract(4)
        ),
    )
    silent_on = Examples(
        lambda: step_at(6, flags=Flag.CLIPPED, **_CLIP),
        lambda: step_at(6, flags=Flag.CLIPPED | Flag.CLIPPED_BEFORE_SYNC, **_CLIP),
        lambda: step_at(
            6, flags=Flag.CLIPPED | Flag.CLIPPED_BEFORE_SYNC | Flag.GRADS_DISCARDED, clip_max=1.0, odd=_OWN_CLIP
        ),
        lambda: step_at(
            6, odd={2: {"grads_digest": 5}}, gradients=gradients(4, {2: {"w": "ff"}}), contract=contract(4)
        ),
    )

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        names = differing(step)
        told = step.answers(Gradients)
        sums = {rank: gradients.reduced_sums for rank, gradients in told.items()}
        compared = [name for name in names if all(name in table for table in sums.values())]
        equal = len(sums) == len(step.rows) and compared == names and bool(names)
        equal = equal and all(len({repr(table[name]) for table in sums.values()}) == 1 for name in compared)
        factors = clip_factors(step)
        unequal_clipping = len({round(f, 6) for f in factors.values()}) > 1
        by_row = not told and _rows_agree_after_reduction(step)
        if not equal and not (by_row and unequal_clipping):
            return None
        evidence: dict[str, Any] = {"gradients_after_reduction": "equal on all ranks"}
        ratios = {str(r): f for r, f in factors.items()} if unequal_clipping else _ratios(step, names)
        if ratios:
            evidence["ratio"] = ratios
        if unequal_clipping:
            evidence["clip_norm"] = {str(rank): row.clip_norm for rank, row in step.rows.items()}
            evidence["clip_max"] = {str(rank): row.clip_max for rank, row in step.rows.items()}
        return Verdict(
            ranks=odd_ranks(step) if unequal_clipping else _who_changed(gradient_classes(step) or {}, ratios),
            subject=tuple(names),
            phase="clipping" if unequal_clipping else None,
            location=clip_location(step) if unequal_clipping else None,
            evidence=evidence,
        )

    reads = (*GRADIENT_COLUMNS, Flag.CLIPPED_BEFORE_SYNC, Flag.GRADS_DISCARDED)

    def suspects(self, step: Step) -> bool:
        return bool(gradient_classes(step)) or bool(self._own_factors(step))

    def detect(self, step: Step) -> Findings:
        yield from super().detect(step)
        factors = self._own_factors(step)
        # what was clipped and then taken away is not what the step uses: gradients of single samples, for privacy
        spent = step.any(Flag.LOCAL_ONLY) or step.any(Flag.GRADS_DISCARDED)
        if factors and not gradient_classes(step) and not spent:
            yield self.finding(
                step,
                ranks=outvoted({rank: round(factor, 3) for rank, factor in factors.items()}),
                subject=(),
                phase="before-reduction",
                location=clip_location(step),
                evidence={
                    "ratio": {str(rank): factor for rank, factor in factors.items()},
                    "clip_norm": {str(rank): row.clip_norm for rank, row in step.rows.items()},
                    "hooks": hooks(step),
                },
            )

    def _own_factors(self, step: Step) -> dict[int, float]:
        """Return each rank's clipping factor, when these were applied before the reduction and differ."""
        factors = clip_factors(step) if step.any(Flag.CLIPPED_BEFORE_SYNC) and len(step.rows) > 1 else {}
        return factors if factors and max(factors.values()) - min(factors.values()) > self.clip_factors_apart else {}


def _who_changed(classes: RankClasses, ratios: Mapping[str, float]) -> tuple[int, ...]:
    """Return the outvoted ranks; without a majority, those whose gradients grew or shrank, if only some did."""
    voted = culprits(classes)
    changed = tuple(rank for rank in voted if abs(ratios.get(str(rank), 1.0) - 1.0) > _UNCHANGED)
    return changed if len(voted) == len(classes) and 0 < len(changed) < len(voted) else voted


def _rows_agree_after_reduction(step: Step) -> bool:
    sums = {repr(row.reduced_sums) for row in step.rows.values()}
    return len(sums) == 1 and "nan" not in next(iter(sums))


def _ratios(step: Step, names: list[str]) -> dict[str, float]:
    """Return rank -> norm of the gradient at the step / right after the reduction, where both were measured."""
    found = {}
    for rank, told in step.answers(Gradients).items():
        whole = math.hypot(*(told.reduced_norms.get(name, 0.0) for name in names))
        if whole > 0 and math.isfinite(whole):
            found[str(rank)] = math.hypot(*(told.step_norms.get(name, 0.0) for name in names)) / whole
    return found
