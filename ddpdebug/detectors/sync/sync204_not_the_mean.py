"""SYNC204: the all-reduce did not give the mean of what went in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES, meshes
from ddpdebug.detectors.examples import contract, step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.detectors.sync.gradients import hooks
from ddpdebug.schema.details import Contract, Gradients
from ddpdebug.schema.row import CHECKSUM_SLOTS, Flag

# The bound. Summing is linear, so sum(reduced) must equal the mean over ranks of sum(local), up to rounding:
# - Each of the n elements of a slot is added over W ranks and divided once. An operation rounds by at most u times its
#   result, with independent signs: partial results after h ranks are at most h times a typical element, together
#   sqrt(1 + 4 + ... + W^2) / W = sqrt(W / 3) roundings of an element. Over the slot they add up like a random walk:
#   u * sqrt(W / 3) * norm, where norm is the root mean square over ranks of the slot's 2-norm.
# - The checksum itself adds n numbers in at least fp32. Partial sums of i random terms are about sqrt(i) elements, so
#   the roundings add up to u32 * norm * sqrt(n / 2); if all terms have one sign, to u32 * |sum| * sqrt(n / 3). With
#   n = 1e8 and a factor 8 for bad luck both are below 2^16 * u32 = 2^-8. (Blocked summation does far better.)
# - Elements that are all equal round alike: the transport's error is then u * |sum|, which the second term covers.
# So the bound is 2^-8 * (norm + |sum|) for a reduction in 32 bits, with 8 * sqrt(W) * u16 * norm + 4 * u16 * |sum|
# on top if it travels in 16 bits; u16 = 2^-8 is that of bf16, fp16 is finer. A missing division by W, or one rank's
# share lost, is off by the order of |sum| itself, which is about norm.
_FP32 = 2.0**-8
_U16 = 2.0**-8
_MAYBE_HALF = Flag.HALF_REDUCTION | Flag.CUSTOM_REDUCTION
_EXCLUDED = (
    Flag.LOSSY_REDUCTION | Flag.LOCAL_ONLY | Flag.SKIPPED | Flag.IN_JOIN | Flag.UNSYNCED_BACKWARD | Flag.BYPASS
) | (Flag.LOCAL_GRADS_NONFINITE | Flag.GRADS_NONFINITE | Flag.SHARDED_STATE | Flag.SHARDS_UNREDUCED)

_SUMMED: dict[str, Any] = {f"reduced_sum_{slot}": 4 * (0.3 if slot % 2 else -0.2) for slot in range(CHECKSUM_SLOTS)}
_SHARDS = Flag.SHARDED | Flag.NO_DDP
_PIECES: dict[str, Any] = {f"reduced_sum_{slot}": 0.25 for slot in range(CHECKSUM_SLOTS)}
_PUT_IN: dict[str, Any] = {f"local_sum_{slot}": 0.25 for slot in range(CHECKSUM_SLOTS)}
_LOST: dict[int, Any] = {2: {f"reduced_sum_{slot}": 0.0 for slot in range(CHECKSUM_SLOTS)}}
_SLIGHTLY: dict[str, Any] = {name: 0.26 * value for name, value in _SUMMED.items()}
_OF_SHARDS: Fields = {
    "causes": (
        "a function for `set_custom_reduce_scatter` or `set_all_reduce_hook` that does not fill or divide its buffer",
        "a second scaling or reduction of gradients inside backward, in a hook of a parameter",
        "corrupted communication: faulty link, memory or driver, if nobody touches the reduction",
    ),
    "actions": (
        "take the script's own functions out and compare a step: FSDP2's reduction must make the finding disappear",
        "without any run the vendor's collective test (for example reduce_scatter_perf) on the nodes involved",
    ),
}


@dataclass(frozen=True, slots=True)
class _Check:
    found: float
    expected: float
    norm: float

    def error(self) -> float:
        return abs(self.found - self.expected)

    def bound(self, world: int, *, half: bool) -> float:
        """Return how far rounding alone can take `found` from `expected`."""
        size = max(abs(self.found), abs(self.expected)) if half else abs(self.expected)
        bound = _FP32 * (self.norm + size)
        if half:
            bound += 8 * math.sqrt(world) * _U16 * self.norm + 4 * _U16 * abs(self.expected)
        return bound


class NotTheMean(Detector):
    """The reduced gradient, although equal on all ranks, is not the mean of the ranks' own gradients.

    Impact: all ranks agree on a wrong update. The usual factor, the world size, acts as a learning rate that is as
    many times too large; a lost share makes some ranks' data count for nothing.

    Diagnosis: `ratio` is found over expected, fitted over what is off: the world size means that a sum was not
    divided, its inverse that it was divided twice, about (W - 1) / W that one rank's share is missing. Linear checksums
    before and after the reduction are compared with a bound for rounding; approximate hooks (PowerSGD, quantisation)
    are not held to it. Under FSDP2 what all ranks put in is compared with the pieces that they got: the finding names
    the ranks whose piece is off.

    Causes:
    - a comm hook (`register_comm_hook`) that sums without dividing by the group's size, or divides twice
    - a hook that reduces over another group than DDP's, or returns before the reduction has finished
    - a second, manual reduction or scaling of gradients inside backward
    - corrupted communication: faulty link, memory or driver, if nobody touches the reduction

    Remedy:
    - in a hook divide by `process_group.size()` exactly once, and return the future of that work
    - take the hook out and compare a step: DDP's own reduction must make the finding disappear
    - without any hook run the vendor's collective test (for example all_reduce_perf) on the nodes involved
    """

    code = "SYNC204"
    all_ranks = True
    severity = Severity.CRITICAL
    title = "the reduced gradient is not the mean of the ranks' gradients"
    reads = ("local_norm_0",)
    of_several = True
    wants = ("gradients", "contract")
    mean_gross = Threshold(
        0.1,
        "relative distance from the mean that needs one step instead of two",
        source="chosen: a lost share or a missing division is off by about its size, rounding by less than 0.01",
    )
    fires_on = Examples(
        lambda: step_at(0, **_SUMMED),
        lambda: step_at(0, flags=Flag.CUSTOM_REDUCTION | Flag.HALF_REDUCTION, **_SUMMED),
        lambda: (step_at(0, **_SLIGHTLY), step_at(1, **_SLIGHTLY)),
        lambda: step_at(0, flags=_SHARDS, odd=_LOST, **_PIECES, **_PUT_IN),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: step_at(0, flags=_SHARDS, **_PIECES, **_PUT_IN),
        lambda: (step_at(0, **_SLIGHTLY), step_at(1)),
        lambda: step_at(0, flags=Flag.LOSSY_REDUCTION | Flag.CUSTOM_REDUCTION, **_SUMMED),
        lambda: (
            step_at(0, flags=Flag.HALF_REDUCTION, **_SLIGHTLY),
            step_at(1, flags=Flag.HALF_REDUCTION, **_SLIGHTLY),
        ),
        lambda: step_at(0, odd={1: {"local_norm_0": float("nan")}}, **_SUMMED),
        lambda: step_at(0, contract=contract(4, {rank: {"groups": [[rank]]} for rank in range(4)}), **_SUMMED),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._doubtful: set[int] = set()  # optimizers whose last checked step was slightly off

    def can_show(self, step: Step) -> bool:
        return bool(_checks(step))

    def suspects(self, step: Step) -> bool:
        checks = _checks(step)
        off = _off(step, checks)
        return bool(off) and (step.optimizer in self._doubtful or self._gross(checks, off))

    def detect(self, step: Step) -> Findings:
        checks = _checks(step)
        if not checks:
            return
        off = _off(step, checks)
        gross = self._gross(checks, off)
        if gross or (off and step.optimizer in self._doubtful):
            yield self._report(step, checks, off, _ratio(off))
        if off and not gross:
            self._doubtful.add(step.optimizer)
        else:
            self._doubtful.discard(step.optimizer)

    def _report(self, step: Step, checks: Sequence[_Check], off: Sequence[_Check], ratio: float) -> Finding:
        worst = max(off, key=lambda c: c.error() / c.bound(len(step.rows), half=_half(step)))
        own = hooks(step)
        names, ranks = _pieces(step) if step.all(Flag.SHARDED) else (_names(step), set[int]())
        return self.finding(
            step,
            **(_OF_SHARDS if step.all(Flag.SHARDED) else {}),
            ranks=tuple(sorted(ranks or step.rows)),
            subject=tuple(names[:MAX_NAMES]),
            evidence={
                "ratio": ratio,
                "expected": worst.expected,
                "found": worst.found,
                "bound": worst.bound(len(step.rows), half=_half(step)),
                "groups_off": f"{len(off)} of {len(checks)} groups of parameters",
                "parameters": len(names),
                "hook": own[0] if own else None,
            },
        )

    def _gross(self, checks: Sequence[_Check], off: Sequence[_Check]) -> bool:
        large = any(check.error() > self.mean_gross * (check.norm + abs(check.expected)) for check in off)
        return large or (bool(off) and abs(_ratio(checks) - 1) > self.mean_gross)


def _half(step: Step) -> bool:
    return step.any(_MAYBE_HALF)


def _checks(step: Step) -> list[_Check]:
    """Return found and expected checksum of every slot; empty where the step does not allow a comparison."""
    if "checksums" not in step.memo:
        step.memo["checksums"] = _compute(step)
    checks: list[_Check] = step.memo["checksums"]
    return checks


def _compute(step: Step) -> list[_Check]:
    sharded = step.all(Flag.SHARDED)
    if len(step.rows) < 2 or not step.complete or not step.all(Flag.CHECKED) or step.any(_EXCLUDED):
        return []
    if {"grads_digest", "foreign_grads_digest"} & step.differing or (step.any(Flag.NO_DDP) and not sharded):
        return []
    rows = list(step.rows.values())
    if not sharded and _separate_groups(step):
        return []  # each group has a mean of its own; that gradients agree between groups is then a coincidence
    if sharded and any(len({*shown.values()}) > 1 for shown in step.replicas("grads").values()):
        return []  # that is the finding
    checks = []
    columns = zip(
        zip(*(row.local_sums for row in rows), strict=True),
        zip(*(row.local_norms for row in rows), strict=True),
        zip(*(row.reduced_sums for row in rows), strict=True),
        strict=True,
    )
    for sums, norms, reduced in columns:
        if not all(map(math.isfinite, norms)):
            return []
        if any(norms) and sharded and all(map(math.isfinite, (*sums, *reduced))):  # shares of each rank
            checks.append(_Check(math.fsum(reduced), math.fsum(sums), math.hypot(*norms)))
        elif any(norms) and all(map(math.isfinite, (*sums, *reduced))):  # of a large model only some slots are summed
            norm = math.sqrt(math.fsum(n * n for n in norms) / len(norms))
            checks.append(_Check(reduced[0], math.fsum(sums) / len(sums), norm))
    return checks


def _separate_groups(step: Step) -> bool:
    return any(len(group) < step.world for told in step.answers(Contract).values() for group in told.groups)


def _off(step: Step, checks: Sequence[_Check]) -> list[_Check]:
    return [check for check in checks if check.error() > check.bound(len(step.rows), half=_half(step))]


def _ratio(checks: Sequence[_Check]) -> float:
    """Return found over expected, fitted by least squares; NaN where nothing was expected."""
    weight = math.fsum(check.expected**2 for check in checks)
    return math.fsum(check.found * check.expected for check in checks) / weight if weight > 0 else math.nan


def _pieces(step: Step) -> tuple[list[str], set[int]]:
    """Return the sharded parameters of which a rank got a piece that is off, furthest off first, and these ranks."""
    told = step.answers(Gradients)
    places = meshes(step)
    worst, ranks = dict[str, float](), set[int]()
    for rank, own in told.items():
        averages = places[rank].averages if rank in places else ()
        others = [told[other] for other in averages or told if other in told]
        for name, (place, total) in own.got.items():
            put_in = [other.put_in[name] for other in others if name in other.put_in]
            if place < 0 or len(put_in) < len(averages or told):
                continue
            check = _Check(
                total, math.fsum(sums[1 + int(place)] for sums in put_in), math.hypot(*[p[0] for p in put_in])
            )
            bound = check.bound(len(put_in), half=_half(step))
            if check.error() > bound:
                ranks.add(rank)
                worst[name] = max(worst.get(name, 0.0), check.error() / bound if bound > 0 else math.inf)
    return sorted(worst, key=lambda name: -worst[name]), ranks


def _names(step: Step) -> list[str]:
    """Return the parameters whose own checksum is off, those that are furthest off first."""
    told = list(step.answers(Gradients).values())
    if len(told) < len(step.rows):
        return []
    found = []
    for name, value in told[0].reduced_sums.items():
        if not all(name in own.local_sums and name in own.local_norms for own in told):
            continue
        norm = math.sqrt(math.fsum(own.local_norms[name] ** 2 for own in told) / len(told))
        check = _Check(value, math.fsum(own.local_sums[name] for own in told) / len(told), norm)
        bound = check.bound(len(step.rows), half=_half(step))
        if check.error() > bound:
            found.append((-check.error() / bound if bound > 0 else -math.inf, name))
    return [name for _, name in sorted(found)]
