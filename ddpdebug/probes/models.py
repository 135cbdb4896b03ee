"""The DDPs of a process: found as they are made or first called, announced, and hooked."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.ddp_wrapper import Wrapper, announce_model, classify_hook
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.gradient_hooks import GradientHooks
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, DDPBuilds, DDPBuilt, HookRegistered, NoSyncEntered
from ddpdebug.schema.announcements import Announce, WrapperGroup


class Models:
    """The list of DDPs.

    Args:
        announce: tells all ranks.
        hooks: sees the gradients of their parameters.
    """

    def __init__(self, bus: Bus, state: StepState, guard: Guard, announce: Announce, hooks: GradientHooks) -> None:
        self._state, self._entries, self._announce, self._hooks = state, entries_of(guard), announce, hooks
        self._no_syncs: dict[int, list[weakref.ref[Any]]] = {}  # id of a DDP -> its contexts
        bus.on("probe:structure", DDPBuilds, self.before_wrap)
        bus.on("probe:wrapper", DDPBuilt, self._built)
        bus.on("probe:no-sync", NoSyncEntered, self._no_sync)
        bus.on("probe:comm-hook", HookRegistered, self._hooked)

    def before_wrap(self, event: DDPBuilds) -> None:
        """Announce a module's structure and initial values before DDP checks and broadcasts them."""
        if self._entries.threads.may_build():
            self.forget()
            ranks = internals.ranks_of(event.process_group)
            announce_model(event.module, len(self._state.wrappers), ranks, self._announce)

    def _built(self, event: DDPBuilt) -> None:
        if self._entries.threads.may_build():
            self.wrapped(event.ddp)

    def wrapped(self, ddp: DistributedDataParallel) -> Wrapper:
        """Return the `Wrapper` of a DDP; make one if the DDP is new."""
        if (known := self._state.wrapper_of(ddp)) is not None:
            return known
        wrapper = Wrapper(ddp, len(self._state.wrappers), self._entries)
        self._state.wrappers.append(wrapper)
        beside = tuple(internals.groups_beside())
        self._announce(WrapperGroup(ranks=tuple(wrapper.group), beside=beside), wrapper.index)
        for parameter in internals.parameters(ddp.module):
            if id(parameter) in wrapper.trainable:
                self._hooks.add(parameter, wrapper)
        return wrapper

    def forget(self) -> None:
        """Drop references to models and optimizers that are gone."""
        for watch in self._state.watches:
            watch.forget()
        self._hooks.forget()

    def _no_sync(self, event: NoSyncEntered) -> None:
        known = self._no_syncs.setdefault(id(event.ddp), [])
        known[:] = [ref for ref in known if ref() is not None]
        known.append(weakref.ref(event.context))

    def in_no_sync(self, ddp: DistributedDataParallel) -> bool:
        """Whether a `no_sync` context of a DDP has been entered and not left: its generator is suspended."""
        contexts = (ref() for ref in self._no_syncs.get(id(ddp), ()))
        generators = (getattr(context, "gen", None) for context in contexts)
        return any(
            [inspect.isgenerator(g) and inspect.getgeneratorstate(g) == inspect.GEN_SUSPENDED for g in generators]
        )

    def _hooked(self, event: HookRegistered) -> None:
        wrapper = self.wrapped(event.ddp)
        wrapper.hook_kind = "custom"  # nothing is claimed of its sums if the next line fails
        wrapper.hook, wrapper.hook_kind = classify_hook(event.state, event.hook)
        if wrapper.hook_kind in {"known", "half"} and isinstance(event.state, dist.ProcessGroup):
            wrapper.group = internals.ranks_of(event.state)  # torch's own reduce over it

    def release(self) -> None:
        """Remove every hook from the user's models."""
        self._hooks.release()
        for wrapper in self._state.wrappers:
            if wrapper.call_site is not None:
                wrapper.call_site.remove()
