"""Hooks on the gradients of a DDP's parameters while they are still this rank's own: before DDP reduces them.

In a step that is not checked all that is wanted is that gradients come, and when the last one does. A few of the hooks
see that: those of parameters whose gradients came in the last checked step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import gradients
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.nonfinite import Numerics
from ddpdebug.probes.step_state import StepState

#: Hooks of a DDP in a step that is not checked.
_FEW = 16


class GradientHooks:
    """The hooks on the user's parameters. No events: the hooks run for each gradient of each step."""

    def __init__(self, state: StepState, guard: Guard, numerics: Numerics) -> None:
        self._state, self._run, self._numerics = state, guard.run, numerics
        self._owners: dict[int, Wrapper] = {}
        #: By a parameter's number. A handle refers weakly to the table of its hooks, which lives as long as it does.
        self._handles: dict[int, Any] = {}
        self._entries = entries_of(guard)
        self._now = state.clock.now
        self.last_arrival = 0.0  # of a gradient, by the state's clock
        self._few = False  # not all parameters are hooked
        self._step = -1
        self._came: dict[int, dict[int, None]] = {}  # by wrapper: numbers of parameters, as their gradients came
        self._told: Callable[[Wrapper], None] | None = None  # called for each where a device takes times
        self._waiting: dict[int, tuple[Wrapper, int, torch.Tensor]] = {}  # by number: looked at as the backward ends
        self._task = -1  # the backward that they wait for
        guard.when_cut(self._let_go)
        internals.leave_uncompiled(on_gradient)

    def add(self, parameter: torch.Tensor, wrapper: Wrapper | None) -> None:
        """Hook a parameter, once; if several DDPs have it, the newest reduces it."""
        if wrapper is None or not parameter.is_leaf or not parameter.requires_grad:
            return
        key = id(parameter)  # numbers are used again
        known = self._handles.get(key)
        if known is not None and _is_alive(known):
            if wrapper.index > self._owners[key].index:
                self._owners[key] = wrapper
            return
        self._owners[key] = wrapper
        self._handles[key] = self._entries.on_gradient(parameter, on_gradient, weakref.ref(self), key)

    def switch(self) -> None:
        """Hook as many parameters as the coming step needs."""
        if self._state.checking == (not self._few):
            return
        self._few = not self._state.checking
        if self._few:
            self._thin()
            return
        for wrapper in self._state.wrappers:
            module = wrapper.module()
            for parameter in () if module is None else internals.parameters(module):
                if self._owners.get(id(parameter)) is wrapper:
                    self.add(parameter, wrapper)

    def _thin(self) -> None:
        """Of many parameters whose gradients came keep the hooks of the first, the last and some in between."""
        for index, keys in self._came.items():
            came = [key for key in keys if key in self._handles and self._owners[key].index == index]
            few = min(_FEW, len(came))
            kept = {came[i * (len(came) - 1) // max(1, few - 1)] for i in range(few)}
            for key in came:
                if key not in kept:
                    self._handles.pop(key).remove()

    def tell(self, look: Callable[[Wrapper], None] | None) -> None:
        """Set the function that is called for each gradient; None removes it."""
        self._told = look

    def forget(self) -> None:
        """Drop the handles of parameters that are gone."""
        self._handles = {key: handle for key, handle in self._handles.items() if _is_alive(handle)}

    def release(self) -> None:
        """Remove every hook."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._owners.clear()
        self._came.clear()

    def arrived(self, key: int, parameter: torch.Tensor) -> None:
        """Record the gradient of a known parameter; its Python object is made only if the gradient is read."""
        wrapper = self._owners.get(key)
        if wrapper is None:
            return
        self.last_arrival = self._now()
        if self._told is not None:
            self._told(wrapper)
        wrapper.arrived = True  # by whatever thread: torch's own work for the one that called backward
        if not self._state.checking:
            return
        if self._step != self._state.since.number:
            self._step = self._state.since.number
            self._came = {}
            self._let_go()
        self._came.setdefault(wrapper.index, {})[key] = None
        if wrapper.armed:
            self._run("probe:gradients", self._note, wrapper, key, parameter)

    def _note(self, wrapper: Wrapper, key: int, parameter: torch.Tensor) -> None:
        """Have a gradient looked at: with all others as the backward ends, now where it is not this rank's own by then.

        A backward within another has an end of its own, and DDP may hand out what it has reduced there.
        """
        task = internals.graph_task()
        if wrapper.in_place or task < 0:
            self._look([(wrapper, key, parameter)])
            return
        if task != self._task:
            self._entries.at_backward_end("probe:gradients", self._look_at_all)
            self._task = task
        self._waiting[key] = wrapper, key, parameter

    def _let_go(self) -> None:
        self._waiting, self._task = {}, -1

    def _look_at_all(self) -> None:
        waiting = self._waiting
        self._let_go()
        if waiting:
            self._look([*waiting.values()])
            self.last_arrival = self._now()  # all of this was no waiting for others

    def _look(self, rows: Sequence[tuple[Wrapper, int, torch.Tensor]]) -> None:
        noted = gradients.note_local(self._state.since, rows)
        if noted:
            self._run("probe:numerics-gradients", self._numerics.note_local, noted)


def _is_alive(handle: Any) -> bool:
    return handle.hooks_dict_ref() is not None


def on_gradient(hooks: weakref.ref[GradientHooks], key: int, parameter: torch.Tensor) -> None:
    """Record a gradient that has arrived; it is still this rank's own."""
    if torch.compiler.is_compiling():  # by compiled autograd
        return
    me = hooks()
    if me is not None:
        me.arrived(key, parameter)
