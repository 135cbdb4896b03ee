"""Looks at a DDP's buffers where they must be equal: right after its broadcast at the start of forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import torch_internals as internals
from ddpdebug.probes import async_copy as device

if TYPE_CHECKING:
    from ddpdebug.probes.recorder import Recorder


class Buffers:
    """Notes the fingerprints of buffers in the recorder's window."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._broadcast_done = False

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Ask DDP, before it starts the forward, whether it will broadcast buffers now."""
        self._broadcast_done = internals.syncs_buffers_now(ddp)

    def after_broadcast(self, ddp: DistributedDataParallel) -> None:
        """Look at the buffers right after DDP's broadcast, before the module's forward may change them."""
        if self._recorder.checking and torch.is_grad_enabled() and self._broadcast_done:
            self.note(ddp)

    def note(self, ddp: DistributedDataParallel) -> None:
        """Look at the buffers now."""
        ignored = internals.ignored_names(ddp.module)
        named = [(n, b) for n, b in internals.named_buffers(ddp.module) if n not in ignored]
        if named:
            self._recorder.window.buffers.append(([n for n, _ in named], device.digests([b for _, b in named])))
