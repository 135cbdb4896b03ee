"""The state of the training thread's present step, which all probes share.

Made once for a process and given to each probe by its constructor. What was noted since the previous row is `since`;
it goes with the step's record, and a new one begins.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpdebug.clock import time
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.record import SinceLastStep
from ddpdebug.schema.announcements import CutBackward


class Clock:
    """A clock that stops while the training thread is in a collective, so that it measures a rank's own time."""

    __slots__ = ("_depth", "_left", "_thread", "_told", "away")

    def __init__(self) -> None:
        self.away = 0.0  # seconds in collectives so far
        self._thread = self._depth = 0  # which thread is in a collective, and in how many within each other
        self._left = 0.0  # when it went into the outermost
        self._told: Callable[[bool], None] | None = None  # as it stops, and as it goes on

    def tell(self, look: Callable[[bool], None] | None) -> None:
        """Set a function that is called with True as the clock stops and with False as it goes on; None removes it."""
        self._told = look

    def now(self) -> float:
        """Return the seconds of `time.perf_counter` without those in collectives."""
        return (self._left if self._depth else time.perf_counter()) - self.away

    def stop(self) -> None:
        """Stop the clock: a collective begins in this thread."""
        if self._depth and self._thread == threading.get_ident():
            self._depth += 1
        else:
            self._thread, self._depth, self._left = threading.get_ident(), 1, time.perf_counter()
            if self._told is not None:
                self._told(True)

    def go_on(self) -> None:
        """Let the clock go on, if the outermost collective of the thread has ended."""
        if self._depth and self._thread == threading.get_ident():
            self._depth -= 1
            if not self._depth:
                self.away += time.perf_counter() - self._left
                if self._told is not None:
                    self._told(False)

    def reset(self) -> None:
        """Let the clock go on regardless of open collectives: the end of one may not have been seen."""
        self._depth = 0


class StepState:
    """The step in progress, with its models and optimizers.

    Args:
        world: number of ranks.
    """

    def __init__(self, world: int = 1) -> None:
        self.world = world
        self.since = SinceLastStep(started=time.perf_counter())
        self.clock = Clock()
        self.checking = True  # the sampled tier runs in this step
        self.passes = False  # the step has no row, also where it is looked at from some moment on
        self.alone = False  # the step has a row of this rank's, although it is not to be watched
        self.in_backward = 0  # backwards that run, one inside the other
        self.cut_short: CutBackward | None = None  # the newest backward, if an exception has ended it
        self.backwards = self.syncs = 0
        self.reduced = False  # FSDP2 has reduced gradients in the backward that runs
        self.synced = 0  # what `syncs` was when the newest step ended
        self.wrappers: list[Wrapper] = []  # the DDPs
        self.watches: list[OptimizerWatch] = []
        self.messages = -1  # the newest step in which this rank has sent to one other rank, or received from one
        self.averages = False  # parameters are averaged now and then: replicas differ on purpose in between
        self.by_hand = False  # the script updates its parameters without any optimizer of torch's
        self._unwrapped: list[weakref.ref[torch.nn.Module]] = []

    def next_step(self) -> int:
        """Return the number of this rank's coming optimizer step."""
        step = 0
        for watch in self.watches:  # for each collective: a generator takes three times as long
            if watch.step > step:  # noqa: PLR1730 - so does `max`
                step = watch.step
        return step

    def newest(self) -> list[OptimizerWatch]:
        """Return the newest watch of each optimizer's number."""
        return list({watch.index: watch for watch in self.watches}.values())

    def wrapper_of(self, ddp: DistributedDataParallel) -> Wrapper | None:
        """Return the `Wrapper` of a DDP; None if it has none."""
        return next(iter([w for w in self.wrappers if w.ref() is ddp]), None)

    def watch_of(self, index: int) -> OptimizerWatch:
        """Return the newest watch of the optimizer with this number."""
        return next(iter([watch for watch in reversed(tuple(self.watches)) if watch.index == index]))

    def is_given_up(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether several threads step the parameters of an optimizer."""
        return any([watch.given_up and optimizer in watch.optimizers() for watch in tuple(self.watches)])

    def follow(self, module: torch.nn.Module) -> None:
        """Add a model that trains without a DDP."""
        self._unwrapped = [ref for ref in self._unwrapped if ref() is not None]
        self._unwrapped.append(weakref.ref(module))

    def follows(self, module: torch.nn.Module) -> bool:
        """Return whether a module is a model that trains without a DDP."""
        return any([ref() is module for ref in self._unwrapped])

    @property
    def is_sharded(self) -> bool:
        """Whether an optimizer steps DTensors."""
        return any([watch.sharding is not None for watch in self.watches])

    def models(self) -> list[torch.nn.Module]:
        """Return the living models that train, without their wrappers."""
        found = [wrapper.module() for wrapper in self.wrappers] + [ref() for ref in self._unwrapped]
        return [module for module in found if module is not None]
