"""Answers to detail requests, built in the background thread from the records of recent steps.

What is not in the record is looked up in tables that belong to the training thread. Those that it replaces as a whole
are taken in one go; those of the user (modules, buffers) may change while they are read: see `Answering`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.forensics.memory.holder_search import HolderSearch
from ddpdebug.probes.async_copy import Later
from ddpdebug.probes.buffers import BufferLooks
from ddpdebug.probes.layer_statistics import LayerSamples
from ddpdebug.probes.loop_calls import StepCalls
from ddpdebug.probes.nonfinite_notes import Judgement
from ddpdebug.probes.optimizers import GroupSettings
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.recorder import Forwards
from ddpdebug.probes.replicas import Copies
from ddpdebug.probes.shard_gathers import Gathered
from ddpdebug.probes.shard_reductions import ShardSums
from ddpdebug.probes.step_digests import FrozenDigests, GradientDigests, ParameterDigests, StateDigests
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_loop.training_loop import RecipeNotes
from ddpdebug.schema.details import (
    BufferDigests,
    Bypass,
    Contract,
    Detail,
    Gradients,
    HyperParameters,
    LayerStatistics,
    Modes,
    Numerics,
    OptimizerState,
    Parameters,
    Recipe,
    Replicas,
    hex_digest,
    whole_name,
)

_MAX_NAMES = 20_000


@dataclass(frozen=True, slots=True)
class Sources:
    """The tables for answers, beside the record of the step."""

    state: StepState
    holders: HolderSearch


def answer(kind: str, record: StepRecord, sources: Sources) -> Detail | None:
    """Return one kind of detail (see `schema/details.py`) for a step of this rank; None if it is unknown."""
    return _BUILDERS[kind](record, sources)


def is_known(kind: str, record: StepRecord, sources: Sources) -> bool:
    """Whether the answer is complete: some parts arrive later, such as the line of a direct call."""
    if kind == "holders":
        return sources.holders.known()
    if kind == "numerics":
        judgement = record.parts.get(Judgement)
        return judgement is None or judgement.replaying is None or not judgement.replaying.awaited
    if kind != "contract" or record.contract.bypass is None:
        return True
    return any([w.call_site is not None and w.call_site.location is not None for w in sources.state.wrappers])


def _hex(table: Mapping[str, int]) -> dict[str, str]:
    return {name: hex_digest(value) for name, value in list(table.items())[:_MAX_NAMES]}


def _split(table: Mapping[str, int], record: StepRecord, *, owned: bool) -> dict[str, int]:
    return {
        name: table[name]
        for name, is_owned in zip(record.names, record.owned, strict=True)
        if is_owned == owned and name in table
    }


def _parameters(record: StepRecord, _: Sources) -> Parameters:
    digests, frozen = record.parts[ParameterDigests], record.parts[FrozenDigests]
    after = _table(record, digests.after)
    no_ddp = not any(record.owned)
    before = _table(record, digests.before)
    return Parameters(
        before=_hex(before),
        after=_hex(after if no_ddp else _split(after, record, owned=True)),
        previous=_hex(_previous(record, digests, before)),
        foreign={} if no_ddp else _hex(_split(after, record, owned=False)),
        frozen=_hex(dict(zip(frozen.names, frozen.digests(), strict=True))),
        order=tuple(record.names),
        norms=dict(zip(record.names, digests.norms(), strict=False)),
        loads=tuple(record.since.parts[StepCalls].loads),
    )


def _table(record: StepRecord, later: Later | None) -> dict[str, int]:
    """Return name -> digest of one of the per-parameter lists."""
    return {} if later is None else dict(zip(record.names, later(), strict=True))


def _previous(record: StepRecord, digests: ParameterDigests, before: Mapping[str, int]) -> dict[str, int]:
    """Return what the previous step left, as far as is known: equal to `before` where a glance saw no change."""
    if digests.previous is None or digests.glances is None:
        return {}
    rows = zip(record.names, digests.previous, digests.glances(), strict=True)
    return {name: before[name] if old == new else old for name, old, new in rows}


def _gradients(record: StepRecord, _: Sources) -> Gradients:
    gradients = record.parts[GradientDigests]
    table = gradients.table()
    local_sums, local_norms, reduced_sums, reduced_norms = gradients.checksums()
    shards = record.since.parts.get(ShardSums)
    pieces = {} if shards is None else shards.table(record)
    gathered = record.since.parts.get(Gathered) or Gathered()
    return Gradients(
        digests=_hex(_split(table, record, owned=True)),
        foreign=_hex(_split(table, record, owned=False)),
        missing=tuple(gradients.missing),
        local_sums=local_sums,
        local_norms=local_norms,
        reduced_sums=reduced_sums,
        reduced_norms=reduced_norms,
        step_norms=gradients.norms(),
        put_in={whole_name(name): (own.norm, *own.sums) for name, (own, _, _) in pieces.items()},
        got={whole_name(name): (place, total) for name, (_, place, total) in pieces.items()},
        gathered=_hex({whole_name(name): value for name, value in gathered.table(record)[1].items()}),
        kept=tuple([whole_name(name) for name in gathered.names_kept(record)]),
        waiting=tuple([whole_name(name) for name in gathered.names_waiting(record)]),
    )


def _contract(record: StepRecord, sources: Sources) -> Contract:
    unreduced: dict[str, str] = {}
    shapes: list[object] = []
    marked: list[str] = []
    for name, parameter, _, owner in sources.state.watch_of(record.optimizer).table:
        reason = "never-wrapped" if owner is None else owner.unreduced(name.removesuffix("'"), parameter)
        if reason is not None and parameter.requires_grad:
            unreduced[name] = reason
        if owner is None:
            shapes.append((name, *parameter.shape))
            if internals.is_own(parameter):
                marked.append(name)
    wrappers, calls = tuple(sources.state.wrappers), record.since.parts[StepCalls]
    bypass = record.contract.bypass
    site = next(iter([w.call_site.location for w in wrappers if w.call_site and w.call_site.location]), None)
    return replace(
        record.contract,
        bypass=Bypass(location=site) if bypass is not None and site else bypass,
        unreduced=unreduced,
        gathered=tuple(calls.gathered),
        clips=tuple(calls.clips),
        marked=tuple(marked),
        parameters="" if any(record.owned) else hex_digest(fingerprint.of_text(repr(shapes))),
        messages=sources.state.messages >= record.step,
        find_unused=any([ddp.find_unused_parameters for w in wrappers if (ddp := w.ref()) is not None]),
    )


def _state(record: StepRecord, _: Sources) -> OptimizerState:
    table: dict[str, dict[str, Any]] = {}
    state = record.parts[StateDigests]
    values = state.tensors() if state.tensors is not None else []
    for (name, key), value in zip(state.keys, values, strict=True):
        table.setdefault(name, {})[key] = hex_digest(value)
    for name, key, value in state.plain:
        table.setdefault(name, {})[key] = hex_digest(value)
    if norms := record.parts[ParameterDigests].norms():
        names = [f"{name}:{key}" for name, key in state.keys]
        table[""] = dict(zip(names, norms[len(record.names) :], strict=True))
    return OptimizerState(states=table)


def _buffers(record: StepRecord, _: Sources) -> BufferDigests:
    digests: dict[str, int] = {}
    for names, later in record.since.parts[BufferLooks].seen:
        digests.update(zip(names, later(), strict=True))
    return BufferDigests(digests=_hex(digests))


def _modes(record: StepRecord, sources: Sources) -> Modes:
    seen = record.since.parts[Forwards].modes
    modes: dict[str, bool] = {}
    wrappers = tuple(sources.state.wrappers)
    for wrapper in wrappers:
        ddp = wrapper.ref()
        if ddp is None:
            continue
        prefix = f"ddp{wrapper.index}." if len(wrappers) > 1 else ""
        known = zip(internals.named_modules(ddp.module), seen.get(wrapper.index, b""), strict=False)
        modes |= {prefix + (name or "(model)"): bool(training) for (name, _), training in known}
    return Modes(training=modes)


def _layers(record: StepRecord, _: Sources) -> LayerStatistics:
    if (samples := record.parts.get(LayerSamples)) is None:
        return LayerStatistics()
    before = _table(record, record.parts[ParameterDigests].before)
    return samples.detail(record.parts[GradientDigests].norms(), before)


def _numerics(record: StepRecord, _: Sources) -> Numerics:
    judgement = record.parts[Judgement]
    if judgement.replaying is None:
        return judgement.detail
    return replace(judgement.detail, replay=judgement.replaying.told())


def _recipe(record: StepRecord, _: Sources) -> Recipe:
    rates = tuple([group.get("lr") for group in record.parts[GroupSettings].groups])
    return Recipe(**record.since.parts[RecipeNotes].recipe, lr=rates)


_BUILDERS: dict[str, Callable[[StepRecord, Sources], Detail | None]] = {
    "parameters": _parameters,
    "gradients": _gradients,
    "contract": _contract,
    "hyper": lambda record, _: HyperParameters(groups=tuple(record.parts[GroupSettings].groups)),
    "state": _state,
    "buffers": _buffers,
    "modes": _modes,
    "replicas": lambda record, _: Replicas(copies=record.parts[Copies].looks),
    "numerics": _numerics,
    "layers": _layers,
    "holders": lambda _, sources: sources.holders.found(),
    "recipe": _recipe,
}
