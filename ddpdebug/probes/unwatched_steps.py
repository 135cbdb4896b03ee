"""Steps that are not watched: they are counted, and run as without ddpdebug except for a few tests of a flag.

A job of short steps pays for what is looked at by the step, not by the second, so that only some of its steps are
watched (`monitor/sampling.py`, the same on every rank). Between them the looks at what each step calls are left out
as a whole, and no row is made. What is out of the usual wakes them: an evaluation, an exception, an optimizer that is
not known. Then the rest of the step is looked at, but still has no row: the other ranks have none of it. On the CPU,
steps that are not very short are followed by the numbers all the same, and a loss that is not finite is worth a row.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as all_optimizers

from ddpdebug import torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import training_events as events
from ddpdebug.probes.collective_notes import CollectiveNotes
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.nonfinite_notes import Looks
from ddpdebug.probes.record import SinceLastStep
from ddpdebug.probes.recorder import Recorder, keep_for_next
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus
from ddpdebug.schema.step import are_many

#: An optimizer that has not stepped for so many steps of others is not waited for.
_FORGOTTEN = 64
#: Shorter steps are not followed by the numbers, which takes as much as a step may. After a loss that is not finite the
#: next ones are not either: they show nothing new.
_FOLLOWED_SECONDS, _APART = 0.01, 64
#: ... where none of so many was shorter: on a busy machine short ones are interrupted.
_RECENT = 8
#: A forward without gradients in so many steps in a row is a part of them, and no evaluation.
_USUAL_VIEWS = 8
#: So many forwards with gradients are followed before a backward: more are small, and to look takes longer than to run.
_MOST_FORWARDS = 256
_OPTIMIZER = all_optimizers.__file__
#: Who follows the numbers: what is kept of a forward for its replay, and the notes of the forward.
_NUMBERS = frozenset({"probe:scene", "probe:numerics-forward"})


class UnwatchedSteps:
    """Lets steps pass unwatched, and switches to watched ones when they are due.

    Args:
        watched: tells for (optimizer, step) whether the step has a row.
        passed: is told (optimizer, step) of each step that had none.
    """

    def __init__(
        self,
        bus: Bus,
        state: StepState,
        guard: Guard,
        *,
        recorder: Recorder,
        collectives: CollectiveNotes,
        watched: Callable[[int, int], bool],
        passed: Callable[[int, int], None],
    ) -> None:
        self._bus, self._state, self._guard, self._entries = bus, state, guard, entries_of(guard)
        self._recorder, self._collectives, self._watched, self._passed = recorder, collectives, watched, passed
        self.begun = 0  # steps that began unwatched
        self._partly = False  # something of the step that runs has passed already
        self._stepping: list[int] = []
        self._wakes = False  # as soon as the optimizer has stepped
        self._taken = 0  # steps of all optimizers
        self._at: dict[int, int] = {}  # the newest of them by optimizer
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = _nobody  # that has stepped last
        self._backwards = self._views = 0  # of this step; newest steps in a row with a forward without gradients
        self._viewed = self._is_off = False
        self._forwards = 0  # with gradients, since the newest backward
        self._roots: dict[int, Any] = {}
        self._follows = False  # the numbers
        self._recent: deque[float] = deque(maxlen=_RECENT)  # what the newest steps took, in seconds
        self._bad = -_APART  # the step with the newest loss that was not finite
        self._entries.passing = self
        recorder.when_over(self._over)
        guard.when_off("event:Passed", self._give_up)

    # --- between steps ------------------------------------------------------------------------------------------------

    def _over(self, optimizer: int) -> None:
        """A step that was looked at is over: let the next one pass, unless it is to be watched."""
        self._note(optimizer)
        self._state.passes = self._may_pass()
        if self._state.passes:
            self._partly, self._entries.unwatched, self._follows = False, True, self._is_on_cpu()
            self._viewed, self._backwards = False, 0
            self._stepping.clear()
            self._look_for_evaluations()

    def _give_up(self) -> None:
        """Have every step watched: nobody would see the end of one that passes."""
        self._is_off, self._entries.unwatched, self._state.passes = True, False, False

    def _note(self, optimizer: int) -> None:
        self._taken += 1
        self._at[optimizer] = self._taken

    def _may_pass(self) -> bool:
        if self._is_off or not self._recorder.may_pass():
            return False
        for watch in self._state.newest():
            known = self._taken - self._at.get(watch.index, 0) < _FORGOTTEN
            if known and self._watched(watch.index, watch.step):
                return False
        return True

    def wake(self) -> None:
        """Begin to watch the running step."""
        if not self._entries.unwatched:
            return
        if self._stepping:  # a closure: the step ends as it began
            self._wakes = True
            return
        self._entries.unwatched = self._wakes = False
        before = self._state.since
        self._guard.cut()  # what the probes have noted is of an earlier step
        since = self._state.since
        keep_for_next(before, since)
        since.cut = self._partly
        for wrapper in self._state.wrappers if self._partly else ():
            wrapper.elsewhere = True  # its forward was not seen: a backward now has not passed it by
        self._recorder.prepare(partly=self._partly)
        self._bus.emit(events.Woken(self._optimizer()))

    # --- what is called in each step; each returns whether the step is watched from here on ---------------------------

    def leave(self, *_: Any, **__: Any) -> bool:
        """Handle a call that means nothing by itself: the step stays unwatched."""
        return False

    @property
    def only(self) -> frozenset[str] | None:
        """Return the parts that observe forwards now; None for all."""
        return _NUMBERS if self._entries.unwatched else None

    def ddp_forward(self, ddp: DistributedDataParallel, /, *_: Any, **__: Any) -> bool:
        """Handle a call of a DDP; return whether the step is watched from now on."""
        if torch.is_grad_enabled():
            self._collectives.forward(ddp)
        return self.forward()

    def forward(self, *_: Any, **__: Any) -> bool:
        """Handle a call of a model; return whether the step is watched from now on."""
        if not torch.is_grad_enabled():
            return self._views_model()
        self._partly = True
        self._forwards += 1
        return self._follows and self._forwards <= _MOST_FORWARDS

    def _views_model(self) -> bool:
        """A model is called without gradients: it is evaluated, unless each step does so."""
        if self._views < _USUAL_VIEWS:
            self._views += not self._viewed
            self.wake()
        self._viewed = True
        return not self._entries.unwatched

    def prepared(self, *_: Any, **__: Any) -> bool:
        """Handle a DDP's preparation of its forward; return whether the step is watched from now on."""
        return self._follows

    def backward(self, tensors: Any = None, *_: Any, **__: Any) -> bool:
        """Handle a call of `backward`; return whether the step is watched from now on."""
        self._partly = True
        self._backwards += 1
        self._forwards = 0
        self._collectives.backward()
        if not self._follows or are_many(self._state.world) or _is_finite(tensors):
            return False
        step = self._state.next_step()
        if step < self._bad + _APART:
            return False
        self._bad = step
        looks = self._state.since.parts[Looks]
        self.wake()
        self._state.since.parts[Looks], self._state.alone = looks, True
        return True

    def step_begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """Handle the start of an optimizer step; return whether it is watched."""
        if self._stepping and (id(optimizer) in self._stepping or not _is_nested()):
            self._stepping.clear()  # the last step has raised
        if not self._stepping and self._recorder.known(optimizer) is None:
            self._partly = True
            self.wake()
            return True
        self._stepping.append(id(optimizer))
        self.begun += 1
        return False

    def step_ended(self, optimizer: torch.optim.Optimizer) -> bool:
        """Handle the end of an optimizer step that was not watched."""
        if id(optimizer) not in self._stepping:
            return False
        while self._stepping and self._stepping.pop() != id(optimizer):
            pass
        watch = self._recorder.known(optimizer)
        if self._stepping or watch is None:
            return False
        step = self._recorder.count(watch)
        state, now = self._state, time.perf_counter()
        self._recent.append(now - state.since.started)
        self._follows = min(self._recent) >= _FOLLOWED_SECONDS and self._is_on_cpu()
        since, state.since = state.since, SinceLastStep(now, self._guard.elapsed(), state.next_step())
        keep_for_next(since, state.since)
        state.synced = state.syncs
        self._note(watch.index)
        backwards, self._backwards = self._backwards, 0
        self._views = self._views if self._viewed else 0
        self._partly, self._viewed, self._optimizer = False, False, watch.ref or _nobody
        self._passed(watch.index, step)
        self._bus.emit(events.StepPassed(optimizer, watch, step, backwards))
        state.passes = self._may_pass()
        if self._wakes or not state.passes:
            self.wake()
        return False

    def _is_on_cpu(self) -> bool:
        models = self._state.models()
        parameter = internals.first_parameter(models[0]) if models else None
        return parameter is not None and parameter.device.type == "cpu"

    # --- evaluations --------------------------------------------------------------------------------------------------

    def _look_for_evaluations(self) -> None:
        """Look at direct calls of wrapped models: without gradients they evaluate."""
        for wrapper in self._state.wrappers:
            module = wrapper.module()
            if wrapper.index not in self._roots and module is not None and not internals.anything_compiled():
                self._roots[wrapper.index] = self._entries.before_module("event:Woken", module, self._called)

    def _called(self, *_: Any) -> None:
        if self._entries.unwatched and not torch.is_grad_enabled() and self._entries.threads.is_here():
            self._views_model()


def _nobody() -> None:
    """Stand for an optimizer that is not known."""


def _is_nested() -> bool:
    """Return whether an optimizer's step runs inside of another one's: torch's function around it lies there twice."""
    frame, number = sys._getframe(1), 0  # noqa: SLF001 - the documented way to walk the stack cheaply
    while frame is not None:
        number += frame.f_code.co_filename == _OPTIMIZER and frame.f_code.co_name == "wrapper"
        frame = frame.f_back  # type: ignore[assignment]  # the outermost has none
    return number > 1


def _is_finite(loss: Any) -> bool:
    """Return whether nothing is known to be wrong with what `backward` is called on."""
    if not is_a(loss, torch.Tensor) or not internals.is_plain(loss) or loss.device.type != "cpu" or loss.numel() != 1:
        return True
    return math.isfinite(loss.detach().item())
