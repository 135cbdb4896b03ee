"""Model copies outside DDP that should be replicas: EMA and teacher models, found among all modules, or named."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import async_copy as device
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.entries import Entries, entries_of
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.record import Part, StepRecord, combined
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, StepClosing
from ddpdebug.schema.details import Replica, hex_digest

#: Copies are looked for after these steps only, and only if modules have been built since the last time.
_SEARCH_AT = frozenset({0, 16, 256})
_WATCH_USE_STEPS = 4
_MAX_REPLICAS = 4


@dataclass(slots=True)
class Copies(Part, key="probe:replicas"):
    """The fingerprints of living copies, by name."""

    looks: Mapping[str, Replica] = field(default_factory=dict)

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return one digest over the copies that count: those that this rank changes or uses."""
        counting = ((name, look) for name, look in sorted(self.looks.items()) if look.changed or look.used)
        return {"replicas_digest": combined([fingerprint.of_text(f"{name}:{look.digest}") for name, look in counting])}


class Replicas:
    """The watched copies of this rank."""

    def __init__(self, bus: Bus, state: StepState, guard: Guard) -> None:
        self._state, self._entries = state, entries_of(guard)
        guard.when_off("probe:replicas", self.release)
        bus.on("probe:replicas", StepClosing, self._step_closes)
        self._known: dict[str, _Replica] = {}
        self._modules_seen = 0  # at the last search

    def add(self, name: str, module: torch.nn.Module) -> None:
        """Watch a module under a name."""
        self._known[name] = _Replica(module, self._entries, named=True)

    def _step_closes(self, event: StepClosing) -> None:
        """Fingerprint the copies at a checked step of the first optimizer."""
        record, state = event.record, self._state
        if not record.checked or record.optimizer or state.world == 1 or self._entries.threads.several:
            return
        self.search(record.step, state.wrappers, state.watches)
        record.parts[Copies].looks = self.look()

    def search(self, step: int, wrappers: Sequence[Wrapper], watches: Sequence[OptimizerWatch]) -> None:
        """Find root modules with parameters that belong to no DDP and no optimizer."""
        if step not in _SEARCH_AT or not wrappers:
            return
        built = self._entries.built
        if built.modules_seen == self._modules_seen:
            return
        self._modules_seen = built.modules_seen
        taken = {id(p) for watch in watches for p in watch.params}
        taken |= {id(p) for o in built.optimizers for p in internals.params(o)}
        inside = {id(m) for w in wrappers if (ddp := w.ref()) is not None for m in internals.modules(ddp)}
        known = {id(r.module()) for r in self._known.values()}
        found: dict[str, torch.nn.Module] = {}
        for module in built.outermost():
            if id(module) in inside or id(module) in known:
                continue
            params = list(internals.parameters(module))
            if not params or any([id(p) in taken for p in params]) or isinstance(module, DistributedDataParallel):
                continue
            name = type(module).__name__
            while name in found or name in self._known:
                name += "'"
            found[name] = module
        for name in sorted(found)[: _MAX_REPLICAS - len(self._known)]:
            self._known[name] = _Replica(found[name], self._entries, named=False)

    def release(self) -> None:
        """Remove the hooks from the user's modules."""
        for replica in self._known.values():
            replica.release()

    def look(self) -> dict[str, Replica]:
        """Return the present state of each living copy."""
        self._known = {name: r for name, r in self._known.items() if r.module() is not None}
        return {name: replica.look() for name, replica in self._known.items()}


class _Replica:
    def __init__(self, module: torch.nn.Module, entries: Entries, *, named: bool) -> None:
        self._entries = entries
        self.module = weakref.ref(module)
        self._named = named
        self._first: int | None = None
        self._changed = False
        self._used = _Used()
        self._left = _WATCH_USE_STEPS + 1

    def release(self) -> None:
        self._used.remove()

    def look(self) -> Replica:
        module = self.module()
        assert module is not None
        named = [*internals.named_parameters(module), *internals.named_buffers(module)]
        values = device.digests([t for _, t in named])()
        digest = combined(values)
        self._first = digest if self._first is None else self._first
        self._changed = self._changed or digest != self._first
        self._look_for_use(module)
        tensors = {name: hex_digest(value) for (name, _), value in zip(named, values, strict=True)}
        used = self._used.seen or self._named
        return Replica(digest=hex_digest(digest), tensors=tensors, changed=self._changed, used=used)

    def _look_for_use(self, module: torch.nn.Module) -> None:
        """Hook a module that has not changed from one look to the next (a frozen teacher), for a few steps."""
        self._left -= 1
        if self._left == _WATCH_USE_STEPS - 1 and not self._changed and not self._named:
            self._used.handle = self._entries.before_module("probe:replicas", module, self._used.look)
        elif self._left <= 0 or self._changed:
            self._used.remove()


class _Used:
    """Remembers that a module's forward ran."""

    def __init__(self) -> None:
        self.seen = False
        self.handle: Any = None

    def look(self, module: torch.nn.Module, args: Any) -> None:
        """Note a forward."""
        del module, args
        self.seen = True
        self.remove()

    def remove(self) -> None:
        """Take the hook off the user's module: once it knows, or when the time is over."""
        if self.handle is not None:
            self.handle.remove()
