"""Observes module calls from one place in the code of `torch.nn.Module.__call__`; no hooks lie on modules.

Torch's hooks would be seen: those of all modules lie in dictionaries that attention asks before it takes its fast path,
and any hook makes a forward run a frame deeper. A call that nobody looks at costs one test of a flag and of a number.
What a look is given are the arguments of the call, before hooks of the user's, and what it returns, after these.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import bases_of
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.threads import Threads

#: A call that is not looked at, in the variables of `Module.__call__`.
ALSO = " and id(self) not in look.of"


class Door(Protocol):
    """The observer of model calls; see `function_code.Around`."""

    def begins(self, args: Any, kwargs: Any) -> Any:
        """Observe a call that begins."""

    def ended(self, noted: Any, result: Any) -> Any:
        """Observe the result of a call."""

    def failed(self, noted: Any) -> None:
        """Observe the exception of a call."""


class ModuleCalls(internals.InCode):
    """The present observers of module calls."""

    def __init__(self, guard: Guard, threads: Threads) -> None:
        self.idle, self.closed = True, False  # nothing looks at all modules; nothing looks at any
        #: Id of a module whose calls are looked at -> what else does; None where hooks alone do.
        self.of: dict[int, tuple[OneModule, ...] | None] = {}
        self.guard, self.threads = guard, threads
        self.models: Door | None = None  # looks at the calls of modules that are followed
        self._some = False  # there are hooks that look at some modules only
        self._before: tuple[ModuleHook, ...] = ()
        self._after: tuple[ModuleHook, ...] = ()

    # --- what looks ---------------------------------------------------------------------------------------------------

    def follow(self, module: torch.nn.Module) -> None:
        """Pass the calls of a module to `models`, which has to recognise it by itself."""
        self.of[id(module)] = self.of.get(id(module)) or ()

    def unfollow(self) -> None:
        """Pass no more calls to `models`."""
        self.of = {key: looks for key, looks in self.of.items() if looks or looks is None}

    def tidy(self, *hooks: ModuleHook) -> None:
        """Update the list of hooks that are on: those before, and the given ones."""
        known = dict.fromkeys((*self._before, *self._after, *hooks))
        self._before = tuple([hook for hook in known if hook.is_on and not hook.is_after])
        self._after = tuple([hook for hook in known if hook.is_on and hook.is_after])
        self.idle = self.closed or all([hook.of is not None for hook in (*self._before, *self._after)])
        some = [] if self.closed else [key for hook in (*self._before, *self._after) for key in hook.of or ()]
        if some or self._some:
            self._some = bool(some)
            others = {key: looks for key, looks in self.of.items() if looks is not None}
            self.of = {**dict.fromkeys(some), **others}

    def close(self) -> None:
        """Stop observing."""
        self.idle = self.closed = True
        self.of = {}

    # --- the calls ----------------------------------------------------------------------------------------------------

    def begins(self, args: Any, kwargs: Any) -> Any:
        """Observe a call that begins."""
        if self.closed or torch.compiler.is_compiling() or internals.is_tracing():
            return None
        module, given = args[0], args[1:]
        for hook in self._before:
            hook.look(module, given)
        own = self.of.get(id(module))
        if own is None:
            return args, None
        for one in own:
            if one.module() is module:
                self.guard.run(one.part, one.look, module, given)
        return args, None if self.models is None else self.models.begins(args, kwargs)

    def ended(self, noted: Any, result: Any) -> Any:
        """Observe the result of a call."""
        if noted is not None and not self.closed:
            args, model = noted
            if model is not None and self.models is not None:
                self.models.ended(model, result)
            for hook in self._after:
                hook.look(args[0], args[1:], result)
        return result

    def failed(self, noted: Any) -> None:
        """Observe the exception of a call."""
        if noted is not None and not self.closed:
            args, model = noted
            if model is not None and self.models is not None:
                self.models.failed(model)
            for hook in self._after:
                if hook.always_called:
                    hook.look(args[0], args[1:], None)


class OneModule:
    """A hook before the calls of one module."""

    __slots__ = ("_calls", "_key", "look", "module", "part")

    def __init__(self, calls: ModuleCalls, part: str, module: torch.nn.Module, look: Callable[..., None]) -> None:
        self.part, self.look, self.module = part, look, weakref.ref(module)
        self._calls, self._key = calls, id(module)
        if not calls.closed:
            calls.of[self._key] = (*(calls.of.get(self._key) or ()), self)

    def remove(self) -> None:
        """Remove the hook."""
        if looks := self._calls.of.get(self._key):
            self._calls.of[self._key] = tuple([one for one in looks if one is not self])


class ModuleHook:
    """A hook on the calls of all modules in the followed thread, while it is on."""

    def __init__(
        self, calls: ModuleCalls, part: str, look: Callable[..., None], *, is_after: bool, always_called: bool = False
    ) -> None:
        self.is_on, self.is_after, self.always_called = False, is_after, always_called
        self._calls, self._part, self._look = calls, part, look
        self._kinds: dict[int, type] = {}  # by their numbers: a metaclass may have its own `__hash__`
        self.of: frozenset[int] | None = None  # numbers of the modules that it looks at; None looks at all

    def on(self, kinds: Iterable[type] = (), modules: Iterable[torch.nn.Module] | None = None) -> None:
        """Switch on, for modules of these classes and their subclasses; for all modules without any.

        Args:
            modules: look at these only; whoever gives them sees to it that they live until `off`.
        """
        self._kinds = {id(kind): kind for kind in kinds}
        if not self.is_on:
            self.of = None if modules is None else frozenset(map(id, modules))
        if not self.is_on and not self._calls.closed:
            self.is_on = True
            self._calls.tidy(self)

    def off(self) -> None:
        """Switch off."""
        if self.is_on:
            self.is_on = False
            self._calls.tidy(self)

    def look(self, *args: Any) -> None:
        """Call the probe with one module call; the call itself does not change."""
        guard = self._calls.guard
        if self.of is not None and id(args[0]) not in self.of:
            return
        if self._kinds and self._kinds.keys().isdisjoint([id(base) for base in bases_of(type(args[0]))]):
            return
        if self._part in guard.off:
            self.off()
        elif self.is_on and self._calls.threads.is_here():
            guard.run(self._part, self._look, *args)
