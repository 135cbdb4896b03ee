"""SYNC212: gradients are clipped by a norm that is not that of the whole gradient."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from ddpdebug.detectors.comparison import meshes
from ddpdebug.detectors.examples import contract, step_at
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Findings, Severity, Step, Threshold
from ddpdebug.detectors.sync.gradients import clip_location
from ddpdebug.schema.announcements import MeshPlace
from ddpdebug.schema.details import Contract
from ddpdebug.schema.row import Flag

_NO_STEP = Flag.SKIPPED | Flag.GUARD_SKIPPED | Flag.CLIPPED_SCALED | Flag.CLOSURE
_ON_PURPOSE = Flag.LOCAL_ONLY | _NO_STEP
_CHECKED = Flag.CHECKED | Flag.CLIPPED | Flag.SHARDED
#: What `clip_grad_norm_` adds to the norm before it divides by it.
_EPSILON = 1e-6

_PLACES: dict[int, Any] = {r: {"places": {"dp": [r // 2, 2], "tp": [r % 2, 2]}, "model": "m"} for r in range(4)}
_MESH = Facts(topic="mesh:0", values=_PLACES)
_WHOLE = math.sqrt(4 * 9.0 + 16.0)  # parts of 3 on each rank, and replicated norms of 4


def _step(norm: Mapping[int, float] | float, *, limit: float = math.inf, flags: int = 0) -> tuple[Any, ...]:
    """Return a step of four ranks with parts of norm 3 and 4, which were clipped by some norm."""
    odd: dict[int, Any] = {}
    for rank in range(4):
        own = norm if isinstance(norm, float) else norm[rank]
        factor = min(1.0, limit / (own + _EPSILON))
        odd[rank] = {"clip_norm": own, "part_norm": 5 * factor, "share_norm": math.sqrt(9.0 + 4.0) * factor}
    flags |= _CHECKED
    step = step_at(3, odd=odd, flags=flags, clip_max=limit, contract=contract(4))
    return _MESH, replace(step, facts={_MESH.topic: _MESH.values})


def _by_hand(*factors: float) -> tuple[Any, ...]:
    odd = {rank: {"grads_scaled": factor} for rank, factor in enumerate(factors)}
    step = step_at(3, odd=odd, flags=Flag.CHECKED | Flag.SHARDED, contract=contract(4))
    return _MESH, replace(step, facts={_MESH.topic: _MESH.values})


def _stages(*norms: float, messages: bool = True) -> tuple[Any, ...]:
    odd = {rank: {"clip_norm": norm} for rank, norm in enumerate(norms)}
    own = {rank: {"parameters": str(rank), "messages": messages} for rank in range(len(norms))}
    told = contract(len(norms), own, ddp=0)
    return (step_at(3, world=len(norms), odd=odd, flags=Flag.CLIPPED | Flag.NO_DDP, clip_max=1.0, contract=told),)


class WrongClipNorm(Detector):
    """The norm that clipping went by is not that of the whole gradient, each element of it counted once.

    Of sharded training: each rank tells the norm of the gradients that it holds at the step, and how many ranks hold
    the same. Squares add up to those of the whole gradient, before clipping has scaled it. `clip_grad_norm_` and
    `clip_grads_with_norm_` say what they went by. Where the script multiplies the gradients by hand, all ranks should
    multiply by one factor. The stages of a pipeline should go by one norm as well: that each goes by its own is a
    warning.

    Impact: a norm of parts differs between ranks: each scales its part of the gradient by another factor, so that
    the direction of the update is wrong and replicated parameters drift apart. One that counts replicas several times
    clips too early, one that misses parameters too late, and what is logged changes with the number of ranks.

    Diagnosis: `ratio` is the norm that was used by the whole one, `whole_norm`. `counted` says which sum gives the
    number, if one does: that of each rank's own parts, or of all parts that ranks along some dimensions of the mesh
    hold.

    Causes:
    - the norm of `grad.to_local()`, or of `DTensor.to_local()` of a norm, that was never reduced over the ranks
    - squares of replicated gradients (norms, biases, routers) added once for each rank of tensor parallelism, or of
      the dimension over which replicas are kept
    - a reduction over one dimension of the mesh where the gradient is parted over two
    - experts, embeddings or other groups of parameters that the norm leaves out, and the clipping does not
    - squares averaged over the ranks (`ReduceOp.AVG`) where they are to be added
    - `clip_grad_norm_` on each stage of a pipeline, which sees the gradients of its own layers only

    Remedy:
    - give `clip_grad_norm_` the parameters as they are, DTensors included, where all are on one mesh
    - over several meshes take `get_total_norm` for each group of parameters, `full_tensor()` of each, and
      `clip_grads_with_norm_` with the root of the sum of their squares
    - with plain tensors add the squares of sharded gradients over the ranks that hold parts, those of replicated ones
      once
    - over the stages of a pipeline add the squares of their norms, and take `clip_grads_with_norm_`
    """

    code = "SYNC212"
    severity = Severity.ERROR
    title = "gradients are clipped by a norm that is not that of the whole gradient"
    reads = ("share_norm", "grads_scaled", "clip_norm")
    of_several = True
    all_ranks = True
    wants = ("contract",)
    norm_apart = Threshold(
        0.01,
        "relative difference between the norm that clipping used and that of the whole gradient",
        source="chosen: norms that are added up in bfloat16 differ by 0.4 %, one LayerNorm counted twice by more",
    )
    fires_on = Examples(
        lambda: _step(5.0, limit=1.0),
        lambda: _step({0: 5.0, 1: 5.0, 2: 5.0, 3: 5.0}),
        lambda: _step(math.sqrt(4 * 25.0), limit=2.0),
        lambda: _step(math.sqrt(2 * 25.0)),
        lambda: _step(6.0, flags=Flag.CLIPPED_ALL),
        lambda: _by_hand(0.31, 0.28, 0.31, 1.0),
        lambda: _stages(4.0, 7.0),
    )
    silent_on = Examples(
        lambda: _step(_WHOLE, limit=1.0),
        lambda: _step(_WHOLE * 1.004),
        lambda: _step(6.0),  # what was clipped is not known, and may be a part of the parameters
        lambda: _step(5.0, flags=Flag.SKIPPED),
        lambda: _step(5.0, flags=Flag.CLIPPED_SCALED),
        lambda: _step(math.nan),
        lambda: _by_hand(0.31, 0.31, 0.311, 0.31),
        lambda: _stages(4.0, 4.0),
        lambda: _stages(4.0, 7.0, messages=False),  # ranks that train apart
        lambda: _by_hand(0.31, math.nan, 0.2, 0.31),  # no one factor
    )

    def suspects(self, step: Step) -> bool:
        return self._judged(step) is not None or bool(self._scaled(step)) or bool(self._apart(step))

    def detect(self, step: Step) -> Findings:
        if factors := self._scaled(step):
            yield self.finding(
                step,
                title="each rank scales its shards of the gradients by another factor",
                ranks=tuple(step.rows),
                subject=(),
                phase="by hand",
                location=next((told.location for told in step.answers(Contract).values() if told.location), None),
                evidence={"factors": factors},
            )
        told = step.answers(Contract)
        stages = len(told) == len(step.rows) and all(own.messages for own in told.values())
        if stages and (norms := self._apart(step)) and len({own.parameters for own in told.values()}) > 1:
            yield self.finding(
                step,
                severity=Severity.WARNING,
                title="each stage of the pipeline clips by a norm of its own",
                ranks=tuple(step.rows),
                subject=(),
                phase="stages",
                location=clip_location(step),
                evidence={"clip_norm": norms},
            )
        if (found := self._judged(step)) is not None:
            whole, counted = found
            used = {str(rank): row.clip_norm for rank, row in step.rows.items()}
            yield self.finding(
                step,
                ranks=tuple(step.rows),
                subject=(),
                phase="clipping",
                location=clip_location(step),
                evidence={
                    "ratio": {rank: norm / whole for rank, norm in used.items()},
                    "whole_norm": whole,
                    "clip_norm": used,
                    **({"counted": counted} if counted else {}),
                },
            )

    def _apart(self, step: Step) -> dict[str, float]:
        """Return the norms by which ranks without replicas have clipped, where they scaled by factors of their own."""
        if not (step.complete and step.all(Flag.CLIPPED | Flag.NO_DDP)) or step.any(_NO_STEP | Flag.SHARDED):
            return {}
        norms = {str(rank): row.clip_norm for rank, row in step.rows.items()}
        factors = [min(1.0, row.clip_max / (row.clip_norm + _EPSILON)) for row in step.rows.values()]
        apart = all(factor > 0 for factor in factors) and max(factors) > (1 + self.norm_apart) * min(factors)
        return norms if apart and len(norms) > 1 else {}

    def _scaled(self, step: Step) -> dict[str, float]:
        """Return by what each rank has multiplied the shards that it holds; empty where nothing is wrong."""
        if not (step.complete and step.all(Flag.SHARDED)) or step.any(_ON_PURPOSE) or not _are_alike(step):
            return {}
        whole = [
            math.prod(size for _, size in fact.places.values()) == len(step.rows) for fact in meshes(step).values()
        ]
        if not all(whole):  # each node trains by itself
            return {}
        factors = {str(rank): row.grads_scaled for rank, row in step.rows.items()}
        apart = all(value > 0 for value in factors.values()) and len(factors) > 1
        return factors if apart and max(factors.values()) > (1 + self.norm_apart) * min(factors.values()) else {}

    def _judged(self, step: Step) -> tuple[float, str] | None:
        """Return the norm of the whole gradient, and what was counted instead; None where nothing is wrong."""
        if not (step.complete and step.all(Flag.SHARDED) and step.all(Flag.CLIPPED)) or step.any(_ON_PURPOSE):
            return None
        used = {rank: row.clip_norm for rank, row in step.rows.items()}
        scale = {rank: min(1.0, row.clip_max / (row.clip_norm + _EPSILON)) for rank, row in step.rows.items()}
        if not all(value > 0 for value in (*used.values(), *scale.values())):  # or not known
            return None
        parts = {rank: row.part_norm / scale[rank] for rank, row in step.rows.items()}
        whole = math.hypot(*(row.share_norm / scale[rank] for rank, row in step.rows.items()))
        told = meshes(step)
        if not 0 < whole < math.inf or not _are_alike(step):
            return None
        apart = float(self.norm_apart)
        if all(abs(norm - whole) <= apart * whole for norm in used.values()):
            return None
        for counted, sums in _other_sums(parts, told):
            if all(abs(sums[rank] - norm) <= apart / 2 * norm for rank, norm in used.items()):
                return whole, counted
        replicas_agree = all(len({*shown.values()}) == 1 for shown in step.replicas("grads").values())
        return (whole, "") if step.all(Flag.CLIPPED_ALL) and replicas_agree else None


def _are_alike(step: Step) -> bool:
    """Return whether all ranks are known to hold parts of one model."""
    told = meshes(step)
    return len({fact.model for fact in told.values()}) == 1 and len(told) == len(step.rows)


def _other_sums(parts: Mapping[int, float], told: Mapping[int, MeshPlace]) -> Iterator[tuple[str, dict[int, float]]]:
    """Yield in words what may have been counted instead of the whole, with the norm that each rank then has."""
    names = sorted({name for fact in told.values() for name in fact.places})
    for number in range(len(names) + 1):
        for over in combinations(names, number):
            groups = {rank: _along(rank, over, told) for rank in parts}
            sums = {rank: math.hypot(*(parts[other] for other in group)) for rank, group in groups.items()}
            what = "all that each rank holds"
            yield f"{what}, added over {' and '.join(over)}" if over else what, sums
            if over:
                means = {rank: total / math.sqrt(len(groups[rank])) for rank, total in sums.items()}
                yield f"{what}, averaged over {' and '.join(over)}", means


def _along(rank: int, over: Collection[str], told: Mapping[int, MeshPlace]) -> list[int]:
    """Return the ranks that stand as one does on all dimensions but some."""
    own = {name: tuple(place) for name, place in told[rank].places.items() if name not in over}
    return [
        other
        for other, fact in told.items()
        if own == {name: tuple(place) for name, place in fact.places.items() if name not in over}
    ]
