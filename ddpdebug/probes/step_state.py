"""The state of the step that the training thread is in: all that the probes of one step share.

Made once for a process and given to each probe by its constructor. What was noted since the previous row is the
`window`; it goes with the step's record, and a new one begins.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpdebug.probes.async_copy import Later
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.nonfinite_notes import Looks
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.schema.announcements import Gathered
from ddpdebug.schema.details import Clip, Load
from ddpdebug.schema.row import Flag

NO_FLAGS = Flag(0)


class Reduced(NamedTuple):
    """What was taken of a gradient right after its reduction; `key` tells whether it has been touched since."""

    sum: Any
    norm: Any
    digest: int
    key: tuple[int, int, int | None, int]


@dataclass(slots=True)
class Window:
    """What happened since the previous row: micro-batches, events, times."""

    losses: list[Callable[[], float]] = field(default_factory=list)
    cut: bool = False  # an exception has cut it short: what is here is not all
    micro_batches: int = 0
    number: int = 0  # of the step that this window is expected to end in, alike on all ranks
    started: float = 0.0
    data_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    overhead_before: float = 0.0
    modes: bytes | None = None
    batch: list[int] = field(default_factory=list)
    record: list[int] = field(default_factory=list)
    delivered: int = 0  # the DataLoader's newest batch, not yet fed to a training forward
    output: list[int] = field(default_factory=list)
    eval_batch: list[int] = field(default_factory=list)
    eval_output: list[int] = field(default_factory=list)
    rng: int = 0
    flags: Flag = NO_FLAGS
    buffers: list[tuple[list[str], Later]] = field(default_factory=list)
    local: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # id(parameter) -> (sum, norm), before reduction
    reduced: dict[int, Reduced] = field(default_factory=dict)  # after it
    val_losses: list[Callable[[], float]] = field(default_factory=list)
    gathered: list[Gathered] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    looks: Looks = field(default_factory=Looks)
    recipe: dict[str, Any] = field(default_factory=dict)  # fields of `Recipe`, as they become known

    def is_summed(self, key: int) -> bool:
        """Tell whether a parameter's gradient was summed, as far as it was looked at."""
        local, reduced = self.local.get(key), self.reduced.get(key)
        return (local is None or local[0] is not None) and (reduced is None or reduced.sum is not None)


class StepState:
    """The step in progress and what takes part in it.

    Args:
        world: number of ranks.
    """

    def __init__(self, world: int = 1) -> None:
        self.world = world
        self.window = Window(started=time.perf_counter())
        self.checking = True  # the sampled tier runs in this step
        self.in_backward = 0  # backwards that run, one inside the other
        self.backwards = self.syncs = 0
        self.wrappers: list[Wrapper] = []  # the DDPs
        self.watches: list[OptimizerWatch] = []
        self._unwrapped: list[weakref.ref[torch.nn.Module]] = []

    def next_step(self) -> int:
        """Return the number of the optimizer step that the rank is heading for."""
        return max((watch.step for watch in self.watches), default=0)

    def wrapper_of(self, ddp: DistributedDataParallel) -> Wrapper | None:
        """Return the watch of a DDP, if there is one."""
        return next((w for w in self.wrappers if w.ref() is ddp), None)

    def watch_of(self, index: int) -> OptimizerWatch:
        """Return the newest watch of the optimizer with this number."""
        return next(watch for watch in reversed(tuple(self.watches)) if watch.index == index)

    def follow(self, module: torch.nn.Module) -> None:
        """Take a model that trains without a DDP."""
        self._unwrapped = [ref for ref in self._unwrapped if ref() is not None]
        self._unwrapped.append(weakref.ref(module))

    def follows(self, module: torch.nn.Module) -> bool:
        """Tell whether a module is a model that trains without a DDP."""
        return any(ref() is module for ref in self._unwrapped)

    def models(self) -> list[torch.nn.Module]:
        """Return the living models that train, without their wrappers."""
        found = [wrapper.module() for wrapper in self.wrappers] + [ref() for ref in self._unwrapped]
        return [module for module in found if module is not None]
