"""Fingerprints of a DDP's buffers at the moment when they must be equal: right after its broadcast in forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import async_copy as device
from ddpdebug.probes.record import Part, StepRecord, combined
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, ForwardBegan, ForwardPrepared, StepClosing


@dataclass(slots=True)
class BufferLooks(Part, key="probe:buffers"):
    """Names and digests of buffers, one entry for each time they were read."""

    seen: list[tuple[list[str], device.Later]] = field(default_factory=list)

    def columns(self, record: StepRecord) -> dict[str, Any]:
        """Return one digest of all buffers."""
        digests = [digest for _, later in self.seen for digest in later()] if record.checked else []
        return {"buffers_digest": combined(digests)}


class Buffers:
    """The probe of DDP's buffers."""

    def __init__(self, bus: Bus, state: StepState, guard: Guard) -> None:
        self._state = state
        self._broadcast_done = False
        guard.needs("probe:buffers", "probe:broadcast")  # whether DDP has just made them alike
        bus.on("probe:broadcast", ForwardBegan, self.before_forward)
        bus.on("probe:buffers", ForwardPrepared, self.after_broadcast)
        bus.on("probe:buffers", StepClosing, self.after_step)

    def before_forward(self, event: ForwardBegan) -> None:
        """Record, before a forward, whether DDP will broadcast its buffers now."""
        self._broadcast_done = internals.syncs_buffers_now(event.ddp)

    def after_broadcast(self, event: ForwardPrepared) -> None:
        """Fingerprint the buffers right after DDP's broadcast, before the module's forward may change them."""
        if self._state.checking and torch.is_grad_enabled() and self._broadcast_done:
            self.note(event.ddp)

    def after_step(self, event: StepClosing) -> None:
        """Fingerprint the buffers that DDP does not broadcast."""
        if event.record.checked:
            for wrapper in event.watch.wrappers:
                ddp = wrapper.ref()
                if ddp is not None and not internals.broadcasts_buffers(ddp):
                    self.note(ddp)

    def note(self, ddp: DistributedDataParallel) -> None:
        """Fingerprint a DDP's buffers now."""
        ignored = internals.ignored_names(ddp.module)
        named = [(n, b) for n, b in internals.named_buffers(ddp.module) if n not in ignored]
        if named:
            self._state.since.parts[BufferLooks].seen.append(
                ([n for n, _ in named], device.digests([b for _, b in named]))
            )
