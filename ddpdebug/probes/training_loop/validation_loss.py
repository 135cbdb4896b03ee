"""Evaluations of a script: losses computed without gradients, and the models' forwards around them.

In eval mode a loss is a validation loss. One quantity is followed: the losses of one line over one data set, as scalar
as the line made them, and of an evaluation their mean (of sums the mean of the sums). Where they are read is a setting:
what the loss modules of `torch.nn` return, and the models themselves, or what the loss functions return, or nothing.
In train mode, and where the mode matters, forwards without gradients are an evaluation without `eval()`.

The hook by which modules are seen lies on all modules of the process from an optimizer step to the next training
forward, so that training never meets it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import user_location
from ddpdebug.nested import tensors_in
from ddpdebug.probes import async_copy as device
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.loaders import Loaders
from ddpdebug.probes.loop_calls import LoopCalls, Losses
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import (
    Bus,
    CollectiveBegan,
    EvaluationForwardBegan,
    EvaluationForwardEnded,
    ForwardBegan,
    ModuleForwardBegan,
    StepBegan,
    StepEnded,
    Tensors,
    Woken,
)
from ddpdebug.probes.training_loop.modes import EVALUATION, Modes
from ddpdebug.probes.training_loop.samples import Known
from ddpdebug.probes.training_loop.stale_copies import StaleCopies
from ddpdebug.schema.announcements import Announcement, TokenChange, TrainModeValidation, ValidationLine

#: What a line computes at every step belongs to the step (a target, a number for the log): an evaluation comes so many
#: steps after the one before, or computes so many losses.
APART = 3
MANY = 5
#: The line that is followed was left out by so many evaluations: another one is followed from here on.
_LEFT_OUT = 2
_MAX_LINES = 16
_MAX_CHOICES = 3  # as many as are announced
_OUTPUT = "in the model's output"
#: A loss in so much memory is waited with: the script may scale it in place.
_SMALL = 4096

#: The line that called the loss function, and the number of samples of the loader that was begun last.
_Line = tuple[str | None, int | None]


@dataclass(slots=True)
class _Losses:
    """The losses of one line since the last optimizer step. On a device they stay there, as one number."""

    source: str
    count: int = 0
    total: float = 0.0
    there: torch.Tensor | None = None

    def add(self, loss: torch.Tensor) -> None:
        self.count += 1
        with internals.aside(), torch.no_grad():
            if loss.device.type == "cpu":
                self.total += float(loss)
            elif self.there is None:
                self.there = internals.unlisted(loss.to(torch.float32, copy=True))
            else:
                self.there = internals.unlisted(
                    self.there + loss
                )  # a new one: in inference mode no other code may write into it

    def reader(self) -> Callable[[], float]:
        """Return what gives the mean, and may wait for a device."""
        if self.there is None:
            mean = self.total / self.count
            return lambda: mean
        count, total = self.count, self.total
        with internals.aside(), torch.no_grad():
            read = device.numbers([self.there])
        return lambda: (read()[0] + total) / count


class Evaluations:
    """The probe of one process's evaluations.

    Args:
        calls: knows whether the script tells validation losses itself.
        tell: takes what is announced.
        source: where losses are read, as the setting `validation_loss` says.
    """

    def __init__(
        self,
        bus: Bus,
        state: StepState,
        guard: Guard,
        *,
        calls: LoopCalls,
        loaders: Loaders,
        tell: Callable[[Announcement], None],
        source: str = "modules",
    ) -> None:
        self._state, self._calls, self._loaders, self._tell = state, calls, loaders, tell
        self._source = source
        entries = entries_of(guard)
        self._threads, self._hook = entries.threads, entries.after_modules("probe:evaluation", self._ran)
        self._bus, self._before = bus, entries.before_modules("probe:evaluation", self._runs)
        self.without_loss = 0  # evaluations of which no loss was seen
        self._begun = False
        self._trained_on: int | None = None  # number of samples
        self._roots: list[weakref.ref[nn.Module]] = []
        self._forwards = self._evaluated = 0  # of models in eval mode since the last step; the step of the last one
        self._losses: dict[_Line, _Losses] = {}
        self._newest: tuple[_Losses, torch.Tensor, torch.Tensor] | None = None
        self._last: dict[_Line, int] = {}
        self._followed: _Line | None = None
        self._choices = self._left_out = 0
        self._train_mode, self._known, self._copies = _TrainMode(state, tell), Known(), StaleCopies(APART)
        bus.on("probe:evaluation", StepBegan, self.end)
        bus.on("probe:evaluation", StepEnded, self.begin)
        bus.on("probe:evaluation", Woken, self.begin)
        bus.on("probe:evaluation", ForwardBegan, self._forward)
        bus.on("probe:evaluation", ModuleForwardBegan, self._train)
        bus.on("probe:evaluation", CollectiveBegan, lambda _: self._read_newest())

    # --- when to look -------------------------------------------------------------------------------------------------

    def begin(self, _: StepEnded | Woken) -> None:
        """Start to observe after an optimizer step: an evaluation may follow."""
        if self._source == "told" or self._state.in_backward or self._threads.several:
            return
        if internals.anything_compiled():  # what of a model runs as a graph is not seen
            self.release()
            return
        models = self._state.models()
        if {id(ref()) for ref in self._roots} != set(map(id, models)):
            self._known = Known()  # of a fold: what another model has trained on is new to this one
        self._roots = [weakref.ref(model) for model in models]
        losses = internals.LOSS_MODULES if self._source == "modules" else ()
        self._hook.on([*map(type, models), *losses, *self._copies.kinds])
        if self._state.wrappers:
            self._before.on(map(type, models))

    def _forward(self, event: ForwardBegan) -> None:
        """Look at a DDP forward that begins: one with gradients ends an evaluation."""
        self._read_newest()
        if torch.is_grad_enabled():
            self._trains()
            self._known.trains(event.tensors)
            self._copies.trains(event.tensors)
        elif not self._hook.is_on and not internals.in_train_mode(internals.unwrap_compiled(event.ddp.module)):
            self._forwards += 1

    def _train(self, event: ModuleForwardBegan) -> None:
        """Look at the forward of a model without DDP that begins."""
        self._read_newest()
        if torch.is_grad_enabled():
            self._trains()
            for trained in (self._known, self._copies):
                trained.trains(lambda: list(tensors_in((event.args, event.kwargs))))

    # --- what is seen -------------------------------------------------------------------------------------------------

    def _runs(self, module: nn.Module, args: Any) -> None:
        if self._is_around(module):
            self._bus.emit(EvaluationForwardBegan(module, Tensors(args)))

    def _is_around(self, module: nn.Module) -> bool:
        """Return whether a model is evaluated around its DDP."""
        return (
            not torch.is_grad_enabled()
            and not internals.in_train_mode(module)
            and any([ref() is module for ref in self._roots])
            and not any([wrapper.in_forward for wrapper in self._state.wrappers])
        )

    def _ran(self, module: nn.Module, args: Any, output: Any) -> None:
        is_root = any([ref() is module for ref in self._roots])
        if is_root and self._state.wrappers and self._is_around(module):
            self._bus.emit(EvaluationForwardEnded(module, Tensors(output)))
        if torch.is_grad_enabled():
            if is_root:
                self._trains()
            else:
                self._copies.takes_part(module)
        elif is_root:
            self._model_ran(module, args, output)
        elif self._source == "modules" and issubclass(type(module), internals.LOSS_MODULES):
            self.look(output, f"by {_name(module)}")
        elif said := self._copies.ran(module, self._state.next_step(), self._roots, lambda: list(tensors_in(args))):
            self._tell(said)

    def _model_ran(self, model: nn.Module, args: Any, output: Any) -> None:
        if internals.in_train_mode(model):
            samples = self._loaders.samples
            self._train_mode.ran(model, on_other_data=samples is not None and samples != self._trained_on)
            return
        self._forwards += 1
        self._known.evaluates(lambda: list(tensors_in(args)))
        if self._source == "modules" and (loss := loss_in(output)) is not None:
            self.look(loss, _OUTPUT)

    def look(self, loss: Any, source: str) -> None:
        """Take a loss that was computed while gradients are off; `source` names its origin."""
        if self._threads.several or not internals.is_readable(loss):
            return
        models = self._state.models()
        if any([not internals.in_train_mode(model) for model in models]):
            if not self._calls.tells_validation:
                self._add(loss, source)
        elif models:
            self._train_mode.look()

    def _add(self, loss: torch.Tensor, source: str) -> None:
        line = (user_location(), self._loaders.samples)
        if line not in self._losses and len(self._losses) >= _MAX_LINES:
            return
        own = self._losses.setdefault(line, _Losses(source))
        if self._newest is not None and self._newest[0] is own and self._newest[1].data_ptr() == loss.data_ptr():
            return  # a loss module's, which the model returns
        self._read_newest()
        if loss.untyped_storage().nbytes() > _SMALL:
            own.add(loss)
            return
        with internals.aside(), torch.no_grad():
            self._newest = own, internals.unlisted(loss.detach()), internals.unlisted(loss.detach().clone())

    def _read_newest(self) -> None:
        """Read the newest loss as it was computed, or as the script has left it where it is that times the ranks.

        Trainers scale it so in place, to mean it. Collectives are looked at before they change it: the sum over ranks
        that have evaluated the same is that number as well.
        """
        newest, self._newest = self._newest, None
        if newest is not None:
            own, left, computed = newest
            with internals.aside(), torch.no_grad():
                scaled = torch.isclose(left, computed * self._state.world, rtol=1e-6, atol=0.0)
                own.add(torch.where(scaled, left, computed))

    def end(self, _: StepBegan) -> None:
        """Decide before an optimizer step whether the losses since the last one were an evaluation."""
        state = self._state
        if not state.in_backward:  # else it may be a thread of autograd's
            if not self._begun:
                self._trained_on = self._loaders.samples
            self._begun = True
        self._read_newest()
        self._train_mode.end()
        if known := self._known.ends(evaluated=self._count()):
            self._tell(TokenChange(targets="trained", length=known))
        if not self._losses:
            return
        step, losses, self._losses = state.next_step(), self._losses, {}
        found = {
            line: own for line, own in losses.items() if step - self._last.get(line, 0) >= APART or own.count >= MANY
        }
        self._last = {**dict(list(self._last.items())[-_MAX_LINES:]), **dict.fromkeys(losses, step)}
        if found and not self._calls.tells_validation and self._follows(found):
            assert self._followed is not None
            noted = state.since.parts[Losses]
            noted.validation.append(found[self._followed].reader())
            noted.seen = True

    def _count(self) -> bool:
        """Return whether there was an evaluation, and count one of which no loss is known."""
        forwards, self._forwards = self._forwards, 0
        if not forwards:
            return False
        step = self._state.next_step()
        since, self._evaluated = step - self._evaluated, step
        evaluated = since >= APART or forwards >= MANY
        self.without_loss += evaluated and not (self._losses or self._calls.tells_validation)
        return evaluated

    def _follows(self, found: dict[_Line, _Losses]) -> bool:
        """Return whether the line that is followed took part in this evaluation; choose one."""
        if self._followed in found:
            self._left_out = 0
            return True
        self._left_out += 1
        if self._followed is not None and self._left_out < _LEFT_OUT:
            return False
        if self._choices == _MAX_CHOICES:
            return False
        self._choices, self._left_out = self._choices + 1, 0
        others = [line for line in found if line[1] is None or line[1] != self._trained_on]
        self._followed = line = (others or list(found))[0]
        own = found[line]
        self._tell(ValidationLine(location=line[0], samples=line[1], batches=own.count, source=own.source))
        return True

    def _trains(self) -> None:
        """A forward that trains begins: the hooks go, unless it is to be seen whether a copy takes part in it."""
        if not self._copies.waits(self._state.next_step()):
            self.release()

    def close(self) -> None:
        """Remove the hooks, and announce facts that only the end shows."""
        self.release()
        for said in self._copies.at_end():
            self._tell(said)

    def release(self) -> None:
        """Remove the hooks."""
        self._hook.off()
        self._before.off()


class _TrainMode:
    """Forwards without gradients of models in train mode, around the wrapper (those of the wrapper are counted apart).

    They evaluate the model if a loss follows them, or if they are over other data than training: statistics of norms
    are collected in the same way, without a loss and over the data that are trained on.
    """

    def __init__(self, state: StepState, tell: Callable[[Announcement], None]) -> None:
        self._state, self._tell = state, tell
        self._modes = Modes()
        self._waits = False  # a forward, for its loss
        self._count = self._last = 0
        self._location: str | None = None

    def ran(self, model: nn.Module, *, on_other_data: bool) -> None:
        """See a forward."""
        if any([wrapper.in_forward for wrapper in self._state.wrappers]) or not self._modes.evaluates_in_train(model):
            return
        self._count += on_other_data
        self._waits = not on_other_data
        self._location = self._location or user_location()

    def look(self) -> None:
        """See a loss."""
        self._count += self._waits
        self._waits = False

    def end(self) -> None:
        """An optimizer is about to step."""
        if self._location is None:
            return
        step = self._state.next_step()
        since, self._last = step - self._last, step
        if self._count >= EVALUATION and since > APART:
            self._tell(TrainModeValidation(forwards=self._count, location=self._location, since=since))
        self._count, self._waits, self._location = 0, False, None


def loss_in(output: Any) -> torch.Tensor | None:
    """Return the loss in a model's output: the output, the only scalar of a tuple, or the entry `loss`."""
    if is_a(output, dict):
        output = dict.get(output, "loss")
    elif is_a(output, tuple):
        scalars = [item for item in tuple.__iter__(output) if internals.is_readable(item) and item.is_floating_point()]
        output = scalars[0] if len(scalars) == 1 else None
    return output if internals.is_readable(output) and output.is_floating_point() else None


def _name(module: nn.Module) -> str:
    kind = type(module)
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__qualname__
