"""The only place through which torch and Python call ddpdebug: wrappers, hooks, exit handlers, callbacks.

Whatever is registered here runs under `Guard.run` with a part of its own, does nothing any more once ddpdebug is
closed, and is taken away then. Registering is under the guard as well: what this torch does not have is said, and left
out. `tests/isolation/test_isolation.py` sees to it that nothing is registered anywhere else.
"""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

import torch
from torch.nn.modules import module as all_modules
from torch.optim import optimizer as all_optimizers

from ddpdebug import torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.devices import failure
from ddpdebug.isolation.child import is_disposable
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.built import Built
from ddpdebug.probes.importlib_bootstrap import around
from ddpdebug.probes.module_calls import ALSO, ModuleCalls, ModuleHook, OneModule
from ddpdebug.probes.threads import Threads

#: What looks, with the name of its part.
Look = tuple[str, Callable[..., Any]]

#: So many times are taken as a collection begins, and as it ends.
STAMPS = 2
#: What is registered for a time or for one object only, by the method that does it: what, and when.
PASSING = {
    "before_modules": (
        "looks at the calls of all modules, from inside of `torch.nn.Module.__call__`",
        "in checked and in first training forwards, and while an evaluation is looked for; not with `torch.compile`",
    ),
    "after_modules": ("looks at what the calls of all modules return, from there", "as above"),
    "before_module": (
        "looks at the calls of one module, from there",
        "while a direct call of a wrapped model, or of its copy, is looked for; nothing is left on the module",
    ),
    "on_tensor": ("hooks of tensors", "on the outputs of a training forward, until its backward"),
    "before_node": (
        "hooks before nodes of the graph",
        "on those that the loss's gradient enters by, until the backward",
    ),
    "after_node": ("hooks after nodes of the graph", "on those of a loss that is not finite, until the backward"),
    "on_gradient": ("a hook on the accumulation of gradients", "on each parameter of a DDP or of a watched model"),
    "at_backward_end": ("a callback of autograd's engine", "in a backward of a checked step, until it ends"),
    "when_gone": ("weak references with a callback", "on wrappers, optimizers, schedulers, models and storages"),
    "at_exit": ("`atexit`", "until it is closed"),
    "in_child": ("`os.register_at_fork`", "for ever; it does nothing once it is closed"),
    "on_collections": (
        "a callback of Python's garbage collector, the first in `gc.callbacks`",
        "from the end of the first step on, until it is closed; it runs no code in Python",
    ),
    "when_out_of_memory": (
        "torch's observer of failed CUDA allocations",
        "from the first step on CUDA on, for ever; it does nothing once it is closed",
    ),
    "in_code": (
        "the code of the functions of `torch.distributed` by which ranks communicate",
        "from the meeting of several ranks on, until it is closed; the functions stay the same objects",
    ),
    "OperationMode": ("a mode that sees CPU operations", "with `memory_limit`, inside of training forwards"),
}


class Passing(Protocol):
    """The handler of steps that are not watched."""

    def wake(self) -> None:
        """Begin to watch the running step."""


@dataclass(frozen=True)
class Placed:
    """A replacement for something of torch's or Python's, in place until the monitor is closed.

    Args:
        where: module, class and name.
        why: what it tells, for people.
        over: the function that was found there, if that is not one of torch's or Python's.
        hidden: tells what now stands in its place, None while it is ours.
        is_wrapper: false for torch's own hooks and what is changed inside of functions.
    """

    where: str
    why: str
    over: str | None = None
    hidden: Callable[[], str | None] = field(default=lambda: None, repr=False)
    is_wrapper: bool = True


class Entries:
    """All callbacks of one monitor that other code calls.

    Args:
        guard: what all of it runs under.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard, self.threads, self.built = guard, Threads(guard.tell), Built()
        self.calls = ModuleCalls(guard, self.threads)
        self.closed = False
        #: The step that runs is not watched: what each step calls is only counted, unless it is out of the usual.
        self.unwatched = False
        self.passing: Passing | None = None  # what sees to such steps
        self.placed: list[Placed] = []  # what is registered until the end
        self.left_out: list[str] = []  # what could not be
        self._undo: list[tuple[str, Callable[[], Any]]] = []
        self._sees_modules: bool | None = None  # whether calls of modules are looked at; None until somebody asks
        doors = [getattr(kind, name) for kind in (_Door, ModuleCalls) for name in ("begins", "ended", "failed")]
        for function in (Guard.run, _Hook.__call__, _Step.__call__, *doors, *internals.asked_by_woven_code(_Door)):
            internals.leave_uncompiled(function)

    # --- wrappers -----------------------------------------------------------------------------------------------------

    def patch(  # noqa: PLR0913 - one sentence about one function
        self,
        owner: Any,
        name: str,
        why: str = "",
        *,
        before: Sequence[Look] = (),
        after: Sequence[Look] = (),
        failed: Sequence[Look] = (),
        who: Callable[..., bool] | None = None,
        stop: Callable[[], None] | None = None,
        always_ask: bool = False,
        passes: Callable[..., bool] | None = None,
    ) -> None:
        """Observe the calls of a function of a module or class.

        The looks lie in its own code, so that it is the same function, with the same frames below it.

        Args:
            why: what it tells, in a few words, for people.
            before: called with the call's arguments.
            after: called with what it returned and its arguments.
            failed: called with what it raised and its arguments.
            who: tells with the call's arguments whether a thread that is not the followed one is looked at; None is all
                threads.
            stop: called first; raises what the user has asked to be raised here.
            always_ask: ask `who` in the followed thread as well.
            passes: of what is called in each step, called with the arguments, in the followed thread, in the place of
                the looks where the step is not watched; returns whether it is watched from here on.
        """
        door = _Door(self, before, after, failed, who, stop=stop, always_ask=always_ask, passes=passes)
        self.guard.run(f"patch:{name.strip('_')}", self._patch, owner, name, door, why)
        if not any([placed.where == _path(owner, name) for placed in self.placed]):
            self.left_out.append(_path(owner, name))

    def _patch(self, owner: Any, name: str, door: _Door, why: str) -> None:
        if not hasattr(owner, name):
            self.guard.tell("torch", f"this torch has no {_path(owner, name)}: what is seen there is not checked")
            return
        kept, own = vars(owner).get(name), name in vars(owner)
        of_class = isinstance(kept, classmethod)  # what it is bound to is then the first argument
        original = kept.__func__ if isinstance(kept, classmethod) else getattr(owner, name)
        over = _stranger(owner, original)
        undo: Callable[[], None] | None = None
        if own and over is None and isinstance(original, FunctionType):
            undo = internals.look_around(original, door)
        if undo is not None:
            hidden = functools.partial(_hidden, owner, name, kept, look=door)
            self._put(f"patch:{name}", Placed(_path(owner, name), why, None, hidden), undo)
            return

        # a function of somebody else's, or one whose source is not at hand: a wrapper in its place
        made = around(original, door)
        internals.leave_uncompiled(made, nested=False)
        wrapper = functools.wraps(original)(made)
        replacement: Any = classmethod(wrapper) if of_class else wrapper

        def put_back() -> None:
            if vars(owner).get(name) is replacement if isinstance(owner, type) else getattr(owner, name) is replacement:
                setattr(owner, name, kept if of_class else original) if own else delattr(owner, name)

        self._undo.append((f"patch:{name}", put_back))
        setattr(owner, name, replacement)
        self._patch_home(owner, name, original, replacement)
        hidden = functools.partial(_hidden, owner, name, replacement)
        self.placed.append(Placed(_path(owner, name), why, over, hidden))

    def on_modules(self) -> None:
        """Observe module calls on behalf of hooks: of all modules while a hook is on, of single modules, of models."""
        where = _path(torch.nn.Module, "__call__")
        if self.closed or self._sees_modules is not None:
            return
        call = vars(torch.nn.Module).get("__call__")
        undo = None
        if isinstance(call, FunctionType) and _stranger(torch.nn.Module, call) is None:
            undo = self.guard.run("patch:call", internals.look_around, call, self.calls, ALSO)
        self._sees_modules = undo is not None
        why = "models that no DDP wraps; all modules in forwards that are looked at"
        hidden = functools.partial(_hidden, torch.nn.Module, "__call__", call, look=self.calls)
        self._put("patch:call", Placed(where, why, None, hidden), undo)

    def _put(self, part: str, placed: Placed, undo: Callable[[], Any] | None) -> None:
        """Note what was put in place until the end, or left out where there is nothing to undo."""
        if undo is None:
            self.left_out.append(placed.where)
        else:
            self._undo.append((part, undo))
            self.placed.append(placed)

    def on_models(
        self,
        before: Sequence[Look],
        after: Sequence[Look],
        failed: Sequence[Look],
        who: Callable[..., bool],
        stop: Callable[[], None],
        passes: Callable[..., bool],
    ) -> None:
        """Observe the calls of the modules that `calls` follows, as `patch` does for a function."""
        self.on_modules()
        self.calls.models = _Door(self, before, after, failed, who, stop=stop, always_ask=True, passes=passes)

    def _patch_home(self, owner: Any, name: str, original: Any, replacement: Any) -> None:
        """Put a function's wrapper also where it was defined: pickle looks for it there, by name."""
        home = sys.modules.get(str(getattr(original, "__module__", "")))
        if isinstance(owner, type) or home is None or home is owner or vars(home).get(name) is not original:
            return

        def undo() -> None:
            if vars(home).get(name) is replacement:
                setattr(home, name, original)

        self._undo.append((f"patch:{name}", undo))
        setattr(home, name, replacement)

    def code(
        self,
        part: str,
        what: str,
        change: Callable[[Callable[[Any, str], None]], Callable[[], None]],
        look: Any,
        why: str = "",
    ) -> None:
        """Have `change` insert a callback into the code of functions; it returns the function that removes it."""

        def seen(value: Any, source: str) -> None:
            if not self.closed and self.threads.is_here():
                self.guard.run(part, look, value, source)

        undo = self.guard.run(part, change, seen)
        self._put(part, Placed(what, why, is_wrapper=False), undo)

    def in_code(
        self,
        part: str,
        what: str,
        change: Callable[..., Callable[[], None]],
        look: Callable[..., None],
        why: str = "",
        *others: Look,
    ) -> None:
        """Have `change` insert a callback into the code of functions, for calls in any thread.

        Their frame comes last: from there it is not as far to the user's as from the look.

        Args:
            others: looks without arguments and with parts of their own, which `change` is given after the first.
        """
        run = self.guard.run

        def seen(*about: Any) -> None:
            if not self.closed:
                run(part, look, *about, sys._getframe(1))  # noqa: SLF001 - the documented way to walk the stack cheaply

        internals.leave_uncompiled(seen)
        undo = self.guard.run(part, change, seen, *(_Hook(self, *other) for other in others))
        self._put(part, Placed(what, why, is_wrapper=False), undo)

    def over_functions(self, part: str, mode: torch.overrides.TorchFunctionMode, why: str = "") -> None:
        """Push a torch function mode in this thread; it is popped at `close` if no other mode lies over it.

        The mode itself must do nothing any more once `closed`, and run its looks under the guard.
        """

        def undo() -> None:
            if internals.top_function_mode() is mode:
                mode.__exit__(None, None, None)

        entered = self.guard.run(part, mode.__enter__)
        where = type(mode).__name__ if entered is None else "torch.overrides.TorchFunctionMode"
        self._put(part, Placed(where, why, is_wrapper=False), None if entered is None else undo)

    # --- hooks --------------------------------------------------------------------------------------------------------

    def on_step(
        self,
        before: Sequence[Look],
        after: Sequence[Look],
        who: Callable[..., bool],
        why: str = "",
        stop: Callable[[], None] | None = None,
        passes: tuple[Callable[..., bool], Callable[..., bool]] | None = None,
    ) -> None:
        """Hook the step of every optimizer; `stop` is called after the callbacks before the step.

        Args:
            passes: as `patch` has it, before and after a step.
        """
        first, second = (None, None) if passes is None else passes
        doors = _Step(self, before, who, stop, first), _Step(self, after, who, None, second)
        for name, door in zip(("pre", "post"), doors, strict=True):
            register = getattr(all_optimizers, f"register_optimizer_step_{name}_hook")
            handle = self.guard.run(f"patch:step_{name}", register, door)
            where = f"torch.optim.optimizer.register_optimizer_step_{name}_hook"
            self._put(f"patch:step_{name}", Placed(where, why, is_wrapper=False), getattr(handle, "remove", None))

    def on_parts(self, part: str, look: Callable[[torch.nn.Module, str, Any], None], why: str = "") -> None:
        """Hook the registration of module parts: called with (module, name, part) for each parameter and child.

        Not for buffers: a forward may set one anew each time.
        """
        for register in (
            all_modules.register_module_parameter_registration_hook,
            all_modules.register_module_module_registration_hook,
        ):
            where = f"torch.nn.modules.module.{register.__name__}"
            handle = self.guard.run(part, register, _Hook(self, part, look))
            self._put(part, Placed(where, why, is_wrapper=False), getattr(handle, "remove", None))

    def before_modules(self, part: str, look: Callable[[torch.nn.Module, Any], None]) -> ModuleHook:
        """Return a hook that is called before the call of every module, while it is on."""
        self.on_modules()
        return ModuleHook(self.calls, part, look, is_after=False)

    def after_modules(self, part: str, look: Callable[..., None], *, always_call: bool = False) -> ModuleHook:
        """Return a hook that is called after the call of every module, while it is on."""
        self.on_modules()
        return ModuleHook(self.calls, part, look, is_after=True, always_called=always_call)

    def before_module(
        self, part: str, module: torch.nn.Module, look: Callable[[torch.nn.Module, Any], None]
    ) -> OneModule:
        """Hook the calls of one module; return the handle that removes the hook."""
        self.on_modules()
        return OneModule(self.calls, part, module, look)

    def on_tensor(self, part: str, tensor: torch.Tensor, look: Callable[[torch.Tensor | None], None]) -> Any:
        """Hook the gradient of a tensor; return the handle. The hook is called in the thread that runs the backward."""
        return tensor.register_hook(_Hook(self, part, look))

    def before_node(self, part: str, node: Any, look: Callable[[Any], None]) -> Any:
        """Hook an autograd node before its backward; return the handle."""
        return node.register_prehook(_Hook(self, part, look))

    def after_node(self, part: str, node: Any, look: Callable[[Any, Any], None]) -> Any:
        """Hook an autograd node after its backward; return the handle."""
        return node.register_hook(_Hook(self, part, look))

    @staticmethod
    def on_gradient(parameter: torch.Tensor, arrived: Callable[..., None], *about: Any) -> Any:
        """Hook the accumulation of a parameter's gradient, to call `arrived(*about, parameter)`; return the handle.

        The call comes for each gradient of each step: it goes straight there, and must be under the guard itself where
        it does more than note that it came. It holds nothing of ours, for it would hold the parameter in a cycle
        through C++ that the collector cannot see.
        """
        return parameter.register_post_accumulate_grad_hook(functools.partial(arrived, *about))

    def at_backward_end(self, part: str, look: Callable[[], None]) -> None:
        """Call once at the end of the running backward: before DDP hands out the gradients reduced meanwhile."""
        internals.when_backward_ends(functools.partial(self.guard.run, part, look))

    # --- the process --------------------------------------------------------------------------------------------------

    def at_exit(self, part: str, call: Callable[[], None]) -> None:
        """Call at the end of the interpreter, unless the monitor was closed before."""

        def leave() -> None:
            self.guard.run(part, call)

        atexit.register(leave)
        self._undo.append((part, functools.partial(atexit.unregister, leave)))

    def on_collections(self, part: str, times: deque[float]) -> Callable[[], bool]:
        """Append the time `STAMPS` times as a garbage collection begins and ends; return a test whether this is active.

        All of it is made of parts that run in C: a signal that comes during a collection is handled at the next line
        of Python, and what its handler raises in a callback of the collector's is lost.
        """
        stamp = map(times.append, iter(time.perf_counter, None))
        # `max` asks for the key of both of its arguments, (None, 0), (None, 1) and so on, and likes the second one best
        note = functools.partial(max, key=functools.partial(next, zip(stamp, itertools.count(), strict=False)))
        callbacks = gc.callbacks
        callbacks.insert(0, note)  # the script takes its own away from the end

        def is_placed() -> bool:
            return any([one is note for one in callbacks])

        def undo() -> None:
            callbacks[:] = [one for one in callbacks if one is not note]

        self._undo.append((part, undo))
        return is_placed

    def in_child(self, part: str, call: Callable[[], None]) -> None:
        """Call in a forked child. The registration stays for ever, and holds no references."""
        me, method = weakref.ref(self), weakref.WeakMethod(call)

        def forked() -> None:
            entries, found = me(), method()
            if entries is not None and found is not None and not entries.closed and not is_disposable():
                entries.guard.run(part, found)

        os.register_at_fork(after_in_child=forked)

    def when_gone(self, part: str, thing: Any, call: Callable[[], None]) -> weakref.ref[Any]:
        """Return a weak reference to an object; `call` runs when the object is gone."""
        me = weakref.ref(self)

        def gone(_: object) -> None:
            entries = me()
            if entries is not None and not entries.closed:
                entries.guard.run(part, call)

        return weakref.ref(thing, gone)

    def when_out_of_memory(self, part: str, call: Callable[[int, int, int, int], None]) -> bool:
        """Call with (device, requested, total, free) before CUDA raises; return whether this torch supports it."""

        def observed(*numbers: int) -> None:
            if not self.closed:
                self.guard.run(part, call, *numbers)

        return bool(self.guard.run(part, internals.observe_out_of_memory, observed))

    def close(self) -> None:
        """Remove all callbacks; those that other code still holds do nothing any more."""
        self.closed = True
        self.calls.close()
        while self._undo:  # one by one: an exception of the user's may come in between
            part, take_away = self._undo[-1]
            self.guard.run(f"close:{part}", take_away)  # also of a part that has failed and is off
            self._undo.pop()


class _Door(internals.InCode):
    """The looks of one function."""

    __slots__ = (*("_after", "_always_ask", "_before", "_entries", "_failed", "_passes", "_run", "_stop", "_who"),)

    def __init__(  # noqa: PLR0913 - what there is to one function
        self,
        entries: Entries,
        before: Sequence[Look],
        after: Sequence[Look],
        failed: Sequence[Look],
        who: Callable[..., bool] | None,
        *,
        stop: Callable[[], None] | None,
        always_ask: bool,
        passes: Callable[..., bool] | None,
    ) -> None:
        self._entries, self._run, self._who, self._passes = entries, entries.guard.run, who, passes
        self._stop, self._always_ask = stop, always_ask
        self._before, self._after, self._failed = tuple(before), tuple(after), tuple(failed)

    @property
    def idle(self) -> bool:
        """Nothing is looked at."""
        return self._entries.closed

    def begins(self, args: Any, kwargs: Any) -> Any:
        if self._passes is not None and self._entries.unwatched and self._pass_by(args, kwargs):
            return args, kwargs, False
        if torch.compiler.is_compiling() or not self._opens(args, kwargs):
            return None
        if self._stop is not None:
            self._stop()
        for part, look in self._before:
            self._run(part, look, *args, **kwargs)
        return args, kwargs, True

    def ended(self, noted: Any, result: Any) -> Any:
        if noted is not None and noted[2]:
            args, kwargs, _ = noted
            for part, look in self._after:
                self._run(part, look, result, *args, **kwargs)
        return result

    def failed(self, noted: Any) -> None:
        if noted is not None:
            (args, kwargs, watched), error = noted, sys.exception()
            failure.note(error)
            if not watched and self._entries.threads.ident != threading.get_ident():
                return
            if self._passes is not None and self._entries.unwatched and self._entries.passing is not None:
                self._run("event:Woken", self._entries.passing.wake)
            for part, look in self._failed:
                self._run(part, look, error, *args, **kwargs)

    def _pass_by(self, args: Any, kwargs: Any) -> bool:
        """Return whether a call in a step that is not watched is left alone."""
        entries = self._entries
        if entries.closed or entries.threads.ident != threading.get_ident():
            return True
        if self._stop is not None:
            self._stop()
        return self._passes is None or not self._run("event:Passed", self._passes, *args, **kwargs)

    def _opens(self, args: Any, kwargs: Any) -> bool:
        entries = self._entries
        if entries.closed:
            return False
        if self._who is None or (entries.threads.ident == threading.get_ident() and not self._always_ask):
            return True
        return bool(self._run("probe:threads", self._who, *args, **kwargs))


class _Inert:
    """What does nothing in copies and pickles of the object or table that it lies in: any call returns None."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class _Step(_Inert):
    """A hook of all optimizers' steps; a class of the user's that leaves the process by value takes the table along."""

    def __init__(
        self,
        entries: Entries,
        looks: Sequence[Look],
        who: Callable[..., bool],
        stop: Callable[[], None] | None = None,
        passes: Callable[..., bool] | None = None,
    ) -> None:
        self._entries, self._looks, self._who, self._stop, self._passes = entries, tuple(looks), who, stop, passes

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        entries = self._entries
        if torch.compiler.is_compiling() or entries.closed:
            return
        run = entries.guard.run
        if self._passes is not None and entries.unwatched and self._pass_by(optimizer, self._passes):
            return
        if entries.threads.ident == threading.get_ident() or run("probe:threads", self._who, optimizer):
            for part, look in self._looks:
                run(part, look, optimizer, args, kwargs)
            if self._stop is not None:
                self._stop()

    def _pass_by(self, optimizer: Any, passes: Callable[..., bool]) -> bool:
        """Return whether a step that is not watched is left alone."""
        entries = self._entries
        run = entries.guard.run
        if entries.threads.ident != threading.get_ident():
            if run("probe:threads", self._who, optimizer) and entries.passing is not None:
                run("event:Woken", entries.passing.wake)  # the thread that was followed has ended
            return entries.unwatched
        if run("event:Passed", passes, optimizer):
            return False
        if self._stop is not None:
            self._stop()
        return True


class _Hook(_Inert):
    """A hook on one object of the user's."""

    __slots__ = ("_entries", "_look", "_part")
    __torch_unserializable__ = True  # a tensor that carries it can be saved without a warning

    def __init__(self, entries: Entries, part: str, look: Callable[..., Any]) -> None:
        self._entries, self._part, self._look = entries, part, look

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():  # a module's parts are traced, and so is what compiled autograd calls
            return
        entries = self._entries
        if not entries.closed:
            entries.guard.run(self._part, self._look, *args)


def entries_of(guard: Guard) -> Entries:
    """Return the entries of a guard, which has one such object."""
    if guard.entries is None:
        guard.entries = Entries(guard)
    found: Entries = guard.entries
    return found


def _nothing() -> None:
    """Stand in where nothing subscribes."""


def _hidden(owner: Any, name: str, ours: Any, look: internals.Around | None = None) -> str | None:
    """Say where the function comes from that stands in the place of ours; None while that is there, and ours.

    Args:
        look: lies in the function's code, where that is how it is ours.
    """
    found = vars(owner).get(name)
    if found is ours and look is not None and not internals.lies_around(look, getattr(found, "__func__", found)):
        return f"{_home(found)}, as it was"
    return None if found is ours else _home(found)


def _stranger(owner: Any, found: Any) -> str | None:
    """Say where a function comes from that somebody has put into a module or class of torch's or Python's."""
    home = str(getattr(found, "__module__", None) or "")
    place = str(getattr(owner, "__module__" if isinstance(owner, type) else "__name__", ""))
    known = {"", "torch", "ddpdebug", place.partition(".")[0], *sys.stdlib_module_names}
    return None if home.partition(".")[0] in known else _home(found)


def _home(thing: Any) -> str:
    """Say where a function comes from."""
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', type(thing).__name__)}"


def _path(owner: Any, name: str) -> str:
    where = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    return f"{where}.{name}"
