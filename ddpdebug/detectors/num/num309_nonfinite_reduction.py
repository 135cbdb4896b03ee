"""NUM309: the reduction makes finite gradients non-finite."""

from __future__ import annotations

import math
from typing import Any

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Step, Verdict
from ddpdebug.detectors.num.nonfinite import NOTHING, NonfiniteRule, known_of, seen
from ddpdebug.detectors.num.num303_nonfinite_local_gradient import NonfiniteLocalGradient
from ddpdebug.schema.row import Flag

_INF: dict[str, Any] = {"grad_norm": math.inf, "flags": Flag.GRADS_NONFINITE | Flag.HALF_REDUCTION}
_SEEN = {rank: seen(reduced=["head.weight"], largest={"head.weight": 7e4}) for rank in range(4)}


class NonfiniteReduction(NonfiniteRule):
    """The ranks' own gradients were finite before the reduction, and the reduced ones hold nan or inf.

    It arose in the compression, in the sum, or on the way.

    Impact: all ranks apply the same non-finite gradient in the same step; no rank and no batch is to blame.

    Diagnosis: compare the ranks' largest magnitudes with the maximum of the dtype in which the reduction runs: above
    65504 for one rank is overflow in the cast, below it but above when summed is overflow in the sum. Magnitudes that
    are small rule overflow out. Remove the communication hook for one run. Note that with a gradient scaler DDP reduces
    the scaled gradients, before any unscaling.

    Causes:
    - `fp16_compress_hook` together with large or loss-scaled gradients: the cast overflows before the division
    - parameters in float16, whose sum over ranks overflows
    - a custom hook that sums before it divides, divides by 0, or returns before its work is done
    - a hook with error feedback or low-rank state that has become non-finite (PowerSGD)
    - corrupted communication: hardware, driver, or a buffer written while the collective was running

    Remedy:
    - use `bf16_compress_hook`, or reduce in float32
    - in a hook of your own divide by the world size before the cast and the sum
    - lower the loss scale, or clip what explodes
    - if magnitudes were small and it happens again on the same pair of nodes, test these nodes apart from the job
    """

    code = "NUM309"
    title = "every rank's gradient is finite, the reduced one is not"
    after = NonfiniteLocalGradient
    fires_on = Examples(
        lambda: step_at(7, numerics=_SEEN, **_INF),
        lambda: step_at(7, world=2, **_INF),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: step_at(7, odd={1: {"flags": Flag.LOCAL_GRADS_NONFINITE}}, numerics=_SEEN, **_INF),
        lambda: step_at(7, numerics=_SEEN, **{**_INF, "flags": Flag.GRADS_NONFINITE | Flag.SKIPPED}),
    )

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        known = known_of(step)
        ranks = step.ranks_with(Flag.GRADS_NONFINITE)
        if not ranks or not step.all(Flag.CHECKED):
            return None
        names = tuple(dict.fromkeys(name for rank in ranks for name in known.get(rank, NOTHING).reduced))
        largest: dict[str, float] = {}
        for rank, told in known.items():
            sizes = [value for name, value in told.largest.items() if not names or name in names]
            if sizes:
                largest[str(rank)] = max(sizes)
        evidence = {
            "largest": largest,
            "local_grad_norm": {str(rank): row.local_grad_norm for rank, row in step.rows.items()},
            "parameters": len(names),
            "16_bit_reduction": step.any(Flag.HALF_REDUCTION),
            "custom_reduction": step.any(Flag.CUSTOM_REDUCTION),
        }
        return Verdict(ranks=ranks, subject=names, phase="reduction", evidence=evidence)
