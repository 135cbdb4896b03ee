"""Parameters as FSDP2 has gathered them: the same bytes on all ranks that gather from each other.

Each rank puts in the part that it holds and gets those of the others, so that what it computes with is what all compute
with, and its own piece of that is what the optimizer has left. A part of the model that stays gathered through a step
goes on with what it was.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import async_copy as device
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.record import Part, StepRecord
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, GradientsFinal, OptimizerBuilt
from ddpdebug.schema.row import Flag

#: Gathers of a parameter that are looked at in a step: for a forward, and for its backward.
_LOOKS = 2


class _Look(NamedTuple):
    """What was gathered at once."""

    keys: Sequence[int]  # ids of the sharded parameters
    ranks: tuple[int, ...]
    digests: device.Later


@dataclass(slots=True)
class Gathered(Part, key="probe:shard-parameters"):
    """Digests of the tensors gathered in a step, by the id of the sharded parameter."""

    looks: list[_Look] = field(default_factory=list)
    times: Counter[int] = field(default_factory=Counter)
    stayed: list[tuple[Sequence[int], device.Later]] = field(default_factory=list)  # digests of pieces, then of parts
    waiting: set[int] = field(default_factory=set)  # parameters whose gradients nobody has reduced, or not for all

    def note(self, gathering: internals.Gathering) -> None:
        """Fingerprint parameters that were just gathered."""
        pairs = zip(gathering.parameters, gathering.gathered, strict=True)
        chosen = [(id(parameter), whole) for parameter, whole in pairs if self.times[id(parameter)] < _LOOKS]
        keys = [key for key, _ in chosen]
        self.times.update(keys)
        if keys:
            self.looks.append(_Look(keys, gathering.ranks, device.digests([whole for _, whole in chosen])))

    def keep(self, kept: Sequence[tuple[Any, torch.Tensor, torch.Tensor]]) -> None:
        """Fingerprint parameters that stayed gathered, and their expected values."""
        keys = [id(parameter) for parameter, _, _ in kept]
        with torch.no_grad():
            tensors = [*[piece for _, piece, _ in kept], *[part for _, _, part in kept]]
            self.stayed.append((keys, device.digests(tensors)))

    def settle(self, parameters: Sequence[Any], *, is_apart: bool) -> None:
        """Record whether these gradients are reduced over all ranks, or (`is_apart`) only over some of them."""
        keys = [id(parameter) for parameter in parameters]
        self.waiting.difference_update(keys)
        self.waiting.update(keys if is_apart else ())

    def table(self, record: StepRecord) -> tuple[tuple[int, ...], dict[str, int]]:
        """Return the largest group of ranks that gather from each other, and the digests of its parameters by name."""
        own = set(record.ids)
        looks = [look for look in self.looks if not own.isdisjoint(look.keys)]
        ranks = max([look.ranks for look in looks], key=len, default=())
        found: dict[int, set[int]] = {}
        for look in looks:
            for key, digest in zip(look.keys, look.digests() if look.ranks == ranks else (), strict=False):
                found.setdefault(key, set()).add(digest)
        named = zip(record.ids, record.names, strict=True)
        return ranks, {name: fingerprint.combine(sorted(found[key])) for key, name in named if key in found}

    def names_kept(self, record: StepRecord) -> tuple[str, ...]:
        """Return the parameters whose values in this step no longer equal this rank's part of them."""
        stale: set[int] = set()
        for keys, later in self.stayed:
            digests = later()
            pairs = zip(keys, digests[: len(keys)], digests[len(keys) :], strict=True)
            stale |= {key for key, piece, part in pairs if piece != part}
        return tuple([name for key, name in zip(record.ids, record.names, strict=True) if key in stale])

    def names_waiting(self, record: StepRecord) -> tuple[str, ...]:
        """Return the parameters whose gradients wait to be reduced."""
        return tuple([name for key, name in zip(record.ids, record.names, strict=True) if key in self.waiting])

    def columns(self, record: StepRecord) -> dict[str, Any]:
        """Return one digest of all gathered parameters, and a key of the ranks that should have the same."""
        if not record.checked:
            return {}
        ranks, table = self.table(record)
        flags = int(Flag.KEPT_GATHERED) if self.names_kept(record) else 0
        flags |= int(Flag.SHARDS_UNREDUCED) if self.names_waiting(record) else 0
        if not table:
            return {"flags": flags}
        key, values = fingerprint.of_text(repr(sorted(ranks))), fingerprint.combine([*table.values()])
        return {"flags": flags, "gathered_key": key, "gathered_values": values}

    def let_go(self) -> None:
        """Keep numbers instead of tensors."""
        for look in self.looks:
            look.digests()
        for _, later in self.stayed:
            later()


class ShardGathers:
    """The probe of FSDP2's gathers, in checked steps."""

    def __init__(self, bus: Bus, state: StepState, guard: Guard) -> None:
        self._state, self._entries, self._is_placed = state, entries_of(guard), False
        self._holders: dict[int, weakref.ref[Any]] = {}  # of what was gathered in the step
        bus.on("probe:shard-parameters", OptimizerBuilt, self._place)
        bus.on("probe:shard-parameters", GradientsFinal, self._gradients_final)

    def _place(self, _: OptimizerBuilt) -> None:
        """Look at how FSDP2 gathers parameters, once something has loaded it."""
        if not self._is_placed and self._state.world > 1 and (found := internals.fsdp_gathers()) is not None:
            self._is_placed = True
            looks = (("probe:shard-parameters", self._gathered),)
            why = "parameters as FSDP2 has gathered them"
            self._entries.patch(*found, why, after=looks, who=self._is_wanted, always_ask=True)

    def _is_wanted(self, *_: Any, **__: Any) -> bool:
        return self._state.checking

    def _gathered(self, _: Any, *args: Any, **kwargs: Any) -> None:
        gathering = internals.gathering_of(args, kwargs)
        self._state.since.parts[Gathered].note(gathering)
        for parameter, holder in zip(gathering.parameters, gathering.holders, strict=True):
            self._holders[id(parameter)] = weakref.ref(holder)

    def _gradients_final(self, event: GradientsFinal) -> None:
        """Look at gradients that a backward has left with the gathered parameters."""
        if self._holders and event.record.checked:
            known = [(key, ref()) for key in event.record.ids if (ref := self._holders.get(key)) is not None]
            waiting = {key for key, holder in known if holder is not None and internals.waits(holder)}
            event.record.since.parts[Gathered].waiting |= waiting
        self._holders.clear()
