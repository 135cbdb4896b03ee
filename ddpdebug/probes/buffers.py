"""Fingerprints of buffers at the moment when they must be equal: right after a DDP's broadcast in forward.

Where a DDP is told to broadcast none they are read at the end of a step; those of a model that FSDP2 shards before its
forward, when the script may have averaged them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import async_copy as device
from ddpdebug.probes.record import Part, StepRecord, combined
from ddpdebug.probes.sharding import is_of_experts
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, ForwardBegan, ForwardPrepared, ModuleForwardBegan, StepClosing

#: Bytes of a buffer that is read without a DDP.
_LARGEST = 1 << 20


@dataclass(slots=True)
class BufferLooks(Part, key="probe:buffers"):
    """Names and digests of buffers, one entry for each time they were read."""

    seen: list[tuple[list[str], device.Later]] = field(default_factory=list)

    def columns(self, record: StepRecord) -> dict[str, Any]:
        """Return one digest of all buffers."""
        digests = [digest for _, later in self.seen for digest in later()] if record.checked else []
        return {"buffers_digest": combined(digests)}


def _any(_name: str, _buffer: torch.Tensor) -> bool:
    return True


def _is_replica(name: str, buffer: torch.Tensor) -> bool:
    """Return whether all ranks should hold the same; large tables, as of rotations, are constants."""
    return not (
        internals.is_distributed(buffer)
        or buffer.is_meta
        or is_of_experts(name.rpartition(".")[0])
        or buffer.numel() * buffer.itemsize > _LARGEST  # a sparse one has no `nbytes`
    )


class Buffers:
    """The probe of the buffers of DDP, and of FSDP2 over all ranks."""

    def __init__(self, bus: Bus, state: StepState, guard: Guard) -> None:
        self._state = state
        self._broadcast_done = False
        guard.needs("probe:buffers", "probe:broadcast")  # whether DDP has just made them alike
        bus.on("probe:broadcast", ForwardBegan, self.before_forward)
        bus.on("probe:buffers", ForwardPrepared, self.after_broadcast)
        bus.on("probe:buffers", ModuleForwardBegan, self.before_sharded)
        bus.on("probe:buffers", StepClosing, self.after_step)

    def before_forward(self, event: ForwardBegan) -> None:
        """Record, before a forward, whether DDP will broadcast its buffers now."""
        self._broadcast_done = internals.syncs_buffers_now(event.ddp)

    def after_broadcast(self, event: ForwardPrepared) -> None:
        """Fingerprint the buffers right after DDP's broadcast, before the module's forward may change them."""
        if self._state.checking and torch.is_grad_enabled() and self._broadcast_done:
            self.note(event.ddp.module)

    def before_sharded(self, event: ModuleForwardBegan) -> None:
        """Fingerprint the buffers of a model that FSDP2 shards over all ranks, as the step's first forward begins."""
        state = self._state
        if not (state.checking and torch.is_grad_enabled()) or state.since.parts[BufferLooks].seen:
            return
        meshes = [watch.sharding.place.averages for watch in state.watches if watch.sharding is not None]
        whole = any([len(ranks) == state.world for ranks in meshes])
        if whole and internals.any_distributed(internals.parameters(event.module)):
            self.note(event.module, _is_replica)

    def after_step(self, event: StepClosing) -> None:
        """Fingerprint the buffers that nobody broadcasts."""
        if not event.record.checked:
            return
        for wrapper in event.watch.wrappers:
            ddp = wrapper.ref()
            if ddp is not None and not internals.broadcasts_buffers(ddp):
                self.note(ddp.module)

    def note(self, module: torch.nn.Module, chosen: Callable[[str, torch.Tensor], bool] = _any) -> None:
        """Fingerprint a model's buffers now."""
        ignored = internals.ignored_names(module)
        named = [(n, b) for n, b in internals.named_buffers(module) if n not in ignored and chosen(n, b)]
        if named:
            self._state.since.parts[BufferLooks].seen.append(
                ([n for n, _ in named], device.digests([b for _, b in named]))
            )
