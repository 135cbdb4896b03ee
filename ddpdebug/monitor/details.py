"""Answers to detail requests, built in the background thread from the records of recent steps.

What is not in the record is looked up in tables that belong to the training thread. Those that it replaces as a whole
are taken in one go; those of the user (modules, buffers) may change while they are read: see `Answering`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ddpdebug import torch_internals as internals
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.step_state import StepState
from ddpdebug.schema.details import (
    BufferDigests,
    Bypass,
    Contract,
    Detail,
    Gradients,
    Holders,
    HyperParameters,
    LayerStatistics,
    Modes,
    OptimizerState,
    Parameters,
    Recipe,
    Replicas,
    hex_digest,
)

_MAX_NAMES = 20_000


class HolderSearch(Protocol):
    """What looks for who holds on to memory; see `forensics/memory/holder_search.py`."""

    def known(self) -> bool:
        """Tell whether there is an answer, and arrange for one."""

    def found(self) -> Holders | None:
        """Return the newest answer."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What is asked beside the record of the step."""

    state: StepState
    holders: HolderSearch


def answer(kind: str, record: StepRecord, sources: Sources) -> Detail | None:
    """Return one kind of detail (see `schema/details.py`) for a step of this rank; None where it cannot tell."""
    return _BUILDERS[kind](record, sources)


def is_known(kind: str, record: StepRecord, sources: Sources) -> bool:
    """Tell whether the answer is complete: the line of a direct call shows only when it is made again."""
    if kind == "holders":
        return sources.holders.known()
    if kind != "contract" or record.contract.bypass is None:
        return True
    return any(w.call_site is not None and w.call_site.location is not None for w in sources.state.wrappers)


def _hex(table: Mapping[str, int]) -> dict[str, str]:
    return {name: hex_digest(value) for name, value in list(table.items())[:_MAX_NAMES]}


def _split(table: Mapping[str, int], record: StepRecord, *, owned: bool) -> dict[str, int]:
    return {
        name: table[name]
        for name, is_owned in zip(record.names, record.owned, strict=True)
        if is_owned == owned and name in table
    }


def _parameters(record: StepRecord, sources: Sources) -> Parameters:
    del sources
    after = record.digest_table(record.after)
    no_ddp = not any(record.owned)
    before = record.digest_table(record.before)
    return Parameters(
        before=_hex(before),
        after=_hex(after if no_ddp else _split(after, record, owned=True)),
        previous=_hex(_previous(record, before)),
        foreign={} if no_ddp else _hex(_split(after, record, owned=False)),
        frozen=_hex(dict(zip(record.frozen_names, record.frozen(), strict=True))) if record.frozen else {},
        order=tuple(record.names),
        norms=dict(zip(record.names, record.norms(), strict=False)) if record.norms else {},
        loads=tuple(record.window.loads),
    )


def _previous(record: StepRecord, before: Mapping[str, int]) -> dict[str, int]:
    """Return what the previous step left, as far as is known: equal to `before` where a glance saw no change."""
    if record.previous is None or record.before_glance is None:
        return {}
    rows = zip(record.names, record.previous, record.before_glance(), strict=True)
    return {name: before[name] if old == new else old for name, old, new in rows}


def _gradients(record: StepRecord, sources: Sources) -> Gradients:
    table = record.digest_table(record.grads)
    local_sums, local_norms, reduced_sums, reduced_norms = record.checksums()
    del sources
    return Gradients(
        digests=_hex(_split(table, record, owned=True)),
        foreign=_hex(_split(table, record, owned=False)),
        missing=tuple(record.missing),
        local_sums=local_sums,
        local_norms=local_norms,
        reduced_sums=reduced_sums,
        reduced_norms=reduced_norms,
        step_norms=record.gradient_norms(),
    )


def _contract(record: StepRecord, sources: Sources) -> Contract:
    unreduced: dict[str, str] = {}
    for name, parameter, _, owner in sources.state.watch_of(record.optimizer).table:
        reason = "never-wrapped" if owner is None else owner.unreduced(name.removesuffix("'"), parameter)
        if reason is not None and parameter.requires_grad:
            unreduced[name] = reason
    wrappers = tuple(sources.state.wrappers)
    bypass = record.contract.bypass
    site = next((w.call_site.location for w in wrappers if w.call_site and w.call_site.location), None)
    return replace(
        record.contract,
        bypass=Bypass(location=site) if bypass is not None and site else bypass,
        unreduced=unreduced,
        gathered=tuple(record.window.gathered),
        clips=tuple(record.window.clips),
        find_unused=any(ddp.find_unused_parameters for w in wrappers if (ddp := w.ref()) is not None),
    )


def _state(record: StepRecord, sources: Sources) -> OptimizerState:
    del sources
    table: dict[str, dict[str, Any]] = {}
    values = record.state() if record.state is not None else []
    for (name, key), value in zip(record.state_keys, values, strict=True):
        table.setdefault(name, {})[key] = hex_digest(value)
    for name, key, value in record.state_plain:
        table.setdefault(name, {})[key] = hex_digest(value)
    if record.norms is not None:
        names = [f"{name}:{key}" for name, key in record.state_keys]
        table[""] = dict(zip(names, record.norms()[len(record.names) :], strict=True))
    return OptimizerState(states=table)


def _buffers(record: StepRecord, sources: Sources) -> BufferDigests:
    del sources
    digests: dict[str, int] = {}
    for names, later in record.window.buffers:
        digests.update(zip(names, later(), strict=True))
    return BufferDigests(digests=_hex(digests))


def _modes(record: StepRecord, sources: Sources) -> Modes:
    seen = list(record.window.modes or b"")
    modes: dict[str, bool] = {}
    position = 0
    wrappers = tuple(sources.state.wrappers)
    for wrapper in wrappers:
        ddp = wrapper.ref()
        if ddp is None or position >= len(seen):
            continue
        prefix = f"ddp{wrapper.index}." if len(wrappers) > 1 else ""
        for name, _ in internals.named_modules(ddp.module):
            if position < len(seen):
                modes[prefix + (name or "(model)")] = bool(seen[position])
            position += 1
    return Modes(training=modes)


def _layers(record: StepRecord, sources: Sources) -> LayerStatistics:
    del sources
    if record.layers is None:
        return LayerStatistics()
    return record.layers.detail(record.gradient_norms(), record.digest_table(record.before))


def _recipe(record: StepRecord, sources: Sources) -> Recipe:
    del sources
    return Recipe(**record.window.recipe, lr=tuple(group.get("lr") for group in record.hyper))


_BUILDERS: dict[str, Callable[[StepRecord, Sources], Detail | None]] = {
    "parameters": _parameters,
    "gradients": _gradients,
    "contract": _contract,
    "hyper": lambda record, _: HyperParameters(groups=tuple(record.hyper)),
    "state": _state,
    "buffers": _buffers,
    "modes": _modes,
    "replicas": lambda record, _: Replicas(copies=record.replicas),
    "numerics": lambda record, _: record.numerics,
    "layers": _layers,
    "holders": lambda _, sources: sources.holders.found(),
    "recipe": _recipe,
}
