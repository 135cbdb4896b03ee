"""Contracts 8 to 10: agreement of ranks, signals and memory of the model, the end of the run. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ddpdebug.facts.fact import Fact, about, how_often, middle, over
from ddpdebug.facts.seen import Seen
from ddpdebug.schema.announcements import (
    Constants,
    End,
    Failure,
    InitialValues,
    MeshPlace,
    Numbers,
    RandomDraws,
    Structure,
    WrapperGroup,
)
from ddpdebug.schema.details import Contract, LayerStatistics
from ddpdebug.schema.row import Flag

_DIGESTS = {
    "params_after_digest": "parameters after the step",
    "grads_digest": "gradients at the step",
    "foreign_grads_digest": "gradients of parameters that no DDP has",
    "foreign_params_digest": "parameters that no DDP has",
    "frozen_params_digest": "parameters that no optimizer has",
    "buffers_digest": "buffers after their broadcast",
    "hyper_digest": "settings of the optimizer",
    "state_digest": "state of the optimizer",
    "modes_digest": "train and eval mode",
    "presence_digest": "which parameters have a gradient",
    "replicas_digest": "copies outside DDP",
    "rng_digest": "random state before the forward",
}
_FLAGS = (
    (Flag.UNSYNCED_BACKWARD, "a backward that DDP did not reduce feeds the step"),
    (Flag.BYPASS, "the model is called around its DDP"),
    (Flag.LOCAL_ONLY, "replicas are apart on purpose"),
    (Flag.CLIPPED_BEFORE_SYNC, "clipping sees this rank's own gradients"),
    (Flag.BUFFERS_NOT_BROADCAST, "buffers are not broadcast"),
    (Flag.SHARDED_STATE, "the optimizer's state is sharded"),
    (Flag.CUSTOM_REDUCTION, "a hook of the script's reduces"),
    (Flag.HALF_REDUCTION, "gradients are reduced in 16 bits"),
    (Flag.IN_JOIN, "steps are in a Join"),
)
#: Samples of layers that are taken as those of the beginning; they vary with the seed by less than the factor.
_SAMPLES, _DEVIATION = 8, 4.0
#: A state is compared between ranks after so many steps in which it was drawn from.
_DRAWN = 15


def facts(seen: Seen) -> Iterator[Fact]:
    """Yield facts about ranks, signals, memory and the ranks' outcomes."""
    if seen.world > 1:
        yield from _steps(seen)
        yield from _beginnings(seen)
    for optimizer, steps in seen.steps.items():
        graphs = ((s.step, max(row.live_graphs for row in s.rows.values()) > 1) for s in steps)
        yield from how_often(about(9, f"optimizer {optimizer}", "graphs of earlier steps are alive"), graphs)
    yield from _signals(seen)
    reasons = {one.rank: one.value.reason for one in seen.of(End)}
    reasons |= {one.rank: one.value.reason for one in seen.of(Failure)}
    failed = {rank: reason for rank, reason in reasons.items() if reason not in {"finished", "stopped"}}
    value = min(failed.items())[1].partition("\n")[0][:80] if failed else "well"
    place = next((one.value.location for one in seen.of(Failure)), None)
    yield seen.fact(10, "the run", "ends", value, place=place)


def _steps(seen: Seen) -> Iterator[Fact]:
    for optimizer, steps in seen.steps.items():
        name = f"optimizer {optimizer}"
        for digest, what in _DIGESTS.items():
            known = ((s.step, digest in s.differing) for s in steps if s.known(digest) and len(s.rows) > 1)
            yield from how_often(about(8, f"{name}: {what}", "differ between ranks"), known)
        for flag, what in _FLAGS:
            yield from how_often(about(8, name, what), ((s.step, s.any(flag)) for s in steps))
        yield from how_often(about(8, name, "all ranks take the step"), ((s.step, s.complete) for s in steps))
        counts = ((s.step, len({row.micro_batches for row in s.rows.values()}) > 1) for s in steps)
        yield from how_often(about(8, name, "ranks have other numbers of micro-batches"), counts)
        clips = ((s.step, [row.clip_norm for row in s.rows.values()]) for s in steps)
        apart = ((step, max(norms) > 1.01 * min(norms)) for step, norms in clips if all(norm > 0 for norm in norms))
        yield from how_often(about(8, name, "clipping sees other norms on some ranks"), apart)
        syncs = [(s.step, min(s.rows.items())[1].syncs) for s in steps]
        pairs = pairwise(syncs)
        reduced = ((now[0], now[1] - before[1]) for before, now in pairs if now[0] == before[0] + 1)
        yield from over(about(8, name, "reductions in a step"), reduced)


def _beginnings(seen: Seen) -> Iterator[Fact]:
    for kind, what, field in (
        (Structure, "structure", "digest"),
        (InitialValues, "initial values", "digests"),
        (Constants, "constants", "tensors"),
    ):
        told = defaultdict[int, list[tuple[int, Any]]](list)
        for one in seen.of(kind):
            told[one.number].append((one.step, getattr(one.value, field)))
        for number, values in told.items():
            alike = "yes" if all(value == values[0][1] for _, value in values) else "no"
            yield seen.fact(8, f"ddp{number}: {what}", "alike on all ranks as it begins", alike, values[-1][0])
    for group in seen.first_rank(WrapperGroup):
        of = "all ranks" if len(group.value.ranks) == seen.world else f"{len(group.value.ranks)} ranks"
        yield seen.fact(8, f"ddp{group.number}", "reduces over", of, group.step)
    for mesh in seen.first_rank(MeshPlace):
        sizes = ", ".join(f"{name} of {size}" for name, (_, size) in mesh.value.places.items()) or "none"
        yield seen.fact(8, f"optimizer {mesh.number}", "dimensions of its mesh", sizes, mesh.step, of_world=True)
    for _, step, contract in seen.details(Contract):
        yield about(8, "DDP", "communication hook", contract.hook or "none", step, step)
        yield about(8, "DDP", "number of wrappers", str(contract.ddp), step, step)
    yield from _generators(seen)


def _generators(seen: Seen) -> Iterator[Fact]:
    states = defaultdict[tuple[str, str], dict[int, str]](dict)
    for drawn in seen.of(RandomDraws):
        for draws in drawn.value.draws:
            states[draws.place, draws.generator].setdefault(drawn.rank, draws.state)
    for (place, generator), by_rank in states.items():
        if len(by_rank) > 1:
            alike = "alike" if len(set(by_rank.values())) == 1 else "apart"
            yield seen.fact(8, f"generator {generator} in the {place}", "states of the ranks", alike, _DRAWN)


def _signals(seen: Seen) -> Iterator[Fact]:
    spread, dead, full = (defaultdict[str, list[float]](list) for _ in range(3))
    samples = list(seen.details(LayerStatistics))[:_SAMPLES]
    for _, _, one in samples:
        for path, layer in one.modules.items():
            name = f"{layer.class_name} {path}"
            for table, value in ((spread, layer.std), (dead, layer.zero_units), (full, layer.saturated)):
                if value is not None:
                    table[name].append(value)
    newest = max((step for _, step, _ in samples), default=0)
    if len(samples) == _SAMPLES:
        for shares, what in ((dead, "units that are 0 for all inputs"), (full, "outputs at the end of their range")):
            for name, values in shares.items():
                most = "most" if (middle(values) or 0.0) > 0.5 else "few"
                yield about(9, name, what, most, newest, newest)
        for name, values in spread.items():
            if (std := middle(values)) is not None:
                yield about(
                    9, name, "deviation of the outputs as training begins", std, newest, newest, within=_DEVIATION
                )
    changed = {path: one.step for one in seen.of(Numbers) for path in one.value.changes}
    names = ", ".join(sorted(changed)[:20]) or "none"
    yield seen.fact(9, "", "numbers in modules that change from outside", names, max(changed.values(), default=0))
