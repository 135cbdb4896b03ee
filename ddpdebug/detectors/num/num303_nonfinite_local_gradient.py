"""NUM303: a backward makes a rank's own gradient non-finite."""

from __future__ import annotations

import math
from typing import Any

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Step, Verdict
from ddpdebug.detectors.num.nonfinite import NOTHING, ROOT, ReplayedRule, known_of, seen
from ddpdebug.detectors.num.num302_nonfinite_loss import NonfiniteLoss
from ddpdebug.schema.row import Flag

_ALL = Flag.GRADS_NONFINITE
_ODD: dict[int, Any] = {1: {"flags": Flag.LOCAL_GRADS_NONFINITE}}
_SEEN = {1: seen(local=["blocks.0.norm.weight", "blocks.0.fc.weight"])}


class NonfiniteLocalGradient(ReplayedRule):
    """A gradient became nan or inf in the backward of one rank, before the reduction spread it.

    Impact: after the all-reduce every rank holds the bad gradient and every rank looks guilty; a step with it destroys
    the weights unless a gradient scaler skips it.

    Diagnosis: take rank and module from the finding, which was measured before the reduction. Replay the bundle, or
    rerun the step under `torch.autograd.set_detect_anomaly(True)`: it names the forward line of the backward operation,
    for nan only, not for inf. Look for `torch.where`, sqrt, norms and powers just above the named module. With float16
    compare the loss scale with the gradient's magnitude.

    Causes:
    - `autograd function`: a custom `torch.autograd.Function` whose backward divides or reads memory that was not set
    - `sqrt`, `linalg_vector_norm`, `norm`, `cdist`, `pow`: the derivative at 0 of sqrt, of a hand-written norm
      (`x.pow(2).sum().sqrt()`), or of a power below 1
    - `acos`, `asin`, `atanh`, `log`, `log2`, `log10`, `div`, `reciprocal`: log or division near 0, whose derivative
      overflows first; acos, asin or atanh at the end of their range
    - `float16`: overflow of a float16 gradient without a gradient scaler, or with a fixed scale that is too large
    - the unselected branch of `torch.where`: its gradient is 0 times inf, which is nan, although its value is unused

    Remedy:
    - `autograd function`: mend the backward: clamp the divisor there as well, and write all of the gradient
    - `sqrt`, `linalg_vector_norm`, `norm`, `cdist`, `pow`: put an eps under the root, use `torch.linalg.vector_norm`
      (its gradient at 0 is 0). `nan_to_num` on the output does not help: backward still passes through the bad
      operation
    - `acos`, `asin`, `atanh`, `log`, `log2`, `log10`, `div`, `reciprocal`: make the input safe before the operation,
      also where its result is not used: `safe = torch.where(mask, x, torch.ones_like(x)); y = torch.where(mask,
      safe.log(), 0.0)`
    - `float16`: for float16 use `torch.amp.GradScaler`, or bfloat16
    """

    code = "NUM303"
    of_call = True
    title = "the loss is finite, a rank's own gradient is not"
    after = NonfiniteLoss
    fires_on = Examples(
        lambda: (step_at(7, flags=_ALL, odd=_ODD, numerics=_SEEN), step_at(8, flags=_ALL | Flag.LOSS_NONFINITE)),
        lambda: step_at(7, world=1, flags=_ALL | Flag.NO_DDP, numerics={0: seen(reduced=["w"])}),
        lambda: step_at(7, flags=_ALL, numerics={rank: seen(reduced=["w"]) for rank in range(4)}),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: step_at(7, flags=_ALL | Flag.SKIPPED, odd=_ODD, numerics=_SEEN),
        lambda: step_at(7, flags=_ALL, grad_norm=math.inf, numerics={0: seen(reduced=["w"])}),
        lambda: step_at(7, flags=_ALL, odd={1: {"flags": Flag.LOSS_NONFINITE}}),
    )

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        known = known_of(step)
        ranks = step.ranks_with(Flag.LOCAL_GRADS_NONFINITE)
        phase: str | None = "backward"
        if not ranks and step.any(Flag.GRADS_NONFINITE):
            bad = step.ranks_with(Flag.GRADS_NONFINITE)
            if step.any(Flag.NO_DDP) or len(step.rows) == 1:
                ranks = bad
            elif all(math.isfinite(step.row_of(rank).grad_norm) for rank in bad):
                ranks, phase = bad, "after-reduction"
            elif not step.all(Flag.CHECKED):
                ranks, phase = bad, None
        if not ranks:
            return None
        own = {rank: known[rank].local or known[rank].reduced for rank in ranks if rank in known}
        names = [name for rank in ranks for name in own.get(rank, ())]
        modules = tuple(dict.fromkeys(own[rank][0].rpartition(".")[0] or ROOT for rank in ranks if own.get(rank)))
        calls = [call.module for rank in ranks for call in known.get(rank, NOTHING).forward]
        entry = next((list(e.range) for rank in ranks if (e := known.get(rank, NOTHING).entry)), None)
        evidence = {
            "first_parameter": names[0] if names else None,
            "gradient_from_loss": entry,
            "loss": {str(rank): step.rows[rank].loss for rank in ranks if rank in step.rows},
            "nonfinite_gradients": {str(rank): len(found) for rank, found in own.items()},
            "masked_in": calls[:4],
            "observed": None if phase else "only the reduced gradients were looked at in this step",
        }
        return Verdict(ranks=ranks, subject=modules, phase=phase, evidence=evidence)
