"""Evaluations of a script that tells nothing: losses that are computed without gradients.

In eval mode they are a validation loss. One quantity is followed: the losses of one line over one data set, as scalar
as the line made them, and of an evaluation their mean (of sums the mean of the sums). In train mode, right after a
forward of the model itself and where the mode matters, they are an evaluation without `eval()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import user_location
from ddpdebug.observations import Flag
from ddpdebug.probes import device
from ddpdebug.probes.loaders import Loaders
from ddpdebug.probes.recipe.modes import EVALUATION, Modes
from ddpdebug.probes.recorder import Recorder

#: What a line computes at every step belongs to the step (a target, a number for the log): an evaluation comes so many
#: steps after the one before, or computes so many losses.
APART = 3
MANY = 5
#: The line that is followed was left out by so many evaluations: another one is followed from here on.
_LEFT_OUT = 2
_MAX_LINES = 16
_MAX_CHOICES = 3  # as many as are announced
_MAX_LOOKS = 16  # for forwards in train mode, without finding an evaluation

#: The line that called the loss function, and the number of samples of the loader that was begun last.
_Line = tuple[str | None, int | None]


@dataclass(slots=True)
class _Losses:
    """The losses of one line since the last optimizer step. On a device they stay there, as one number."""

    count: int = 0
    total: float = 0.0
    there: torch.Tensor | None = None

    def add(self, loss: torch.Tensor) -> None:
        self.count += 1
        with internals.aside(), torch.no_grad():
            if loss.device.type == "cpu":
                self.total += float(loss)
            elif self.there is None:
                self.there = loss.to(torch.float32, copy=True)
            else:
                self.there = self.there + loss  # a new one: in inference mode no other code may write into it

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
    """One process's evaluations.

    Args:
        models: returns the models that train.
        tell: takes (topic, fact) of what is announced.
    """

    def __init__(
        self,
        recorder: Recorder,
        loaders: Loaders,
        models: Callable[[], list[nn.Module]],
        tell: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._recorder, self._loaders, self._models, self._tell = recorder, loaders, models, tell
        self._begun = False
        self._trained_on: int | None = None  # number of samples
        self._losses: dict[_Line, _Losses] = {}
        self._last: dict[_Line, int] = {}
        self._followed: _Line | None = None
        self._choices = self._left_out = 0
        self._train_mode = _TrainMode(recorder, tell)

    def look(self, loss: Any) -> None:
        """See what a loss function returns while gradients are off."""
        if self._recorder.entries.threads.several or not internals.is_readable(loss):
            return
        models = self._models()
        if any(not model.training for model in models):
            if not self._recorder.events.tells_validation:
                self._add(loss)
        elif models:
            self._train_mode.look(models)

    def _add(self, loss: torch.Tensor) -> None:
        line = (user_location(), self._loaders.samples)
        if line not in self._losses and len(self._losses) >= _MAX_LINES:
            return
        self._losses.setdefault(line, _Losses()).add(loss)

    def end(self) -> None:
        """An optimizer is about to step: what was computed before is an evaluation, or is not."""
        recorder = self._recorder
        if not recorder.in_backward:  # else it may be a thread of autograd's
            if not self._begun:
                self._trained_on = self._loaders.samples
            self._begun = True
        self._train_mode.end()
        if not self._losses:
            return
        step, losses, self._losses = recorder.next_step(), self._losses, {}
        found = {
            line: own for line, own in losses.items() if step - self._last.get(line, 0) >= APART or own.count >= MANY
        }
        self._last = {**dict(list(self._last.items())[-_MAX_LINES:]), **dict.fromkeys(losses, step)}
        if found and not recorder.events.tells_validation and self._follows(found):
            assert self._followed is not None
            recorder.window.val_losses.append(found[self._followed].reader())
            recorder.window.flags |= Flag.VAL_LOSS_SEEN

    def _follows(self, found: dict[_Line, _Losses]) -> bool:
        """Tell whether the line that is followed took part in this evaluation; choose one."""
        if self._followed in found:
            self._left_out = 0
            return True
        self._left_out += 1
        if self._followed is not None and self._left_out < _LEFT_OUT:
            return False
        if self._choices == _MAX_CHOICES:
            return False
        self._choices, self._left_out = self._choices + 1, 0
        others = (line for line in found if line[1] is None or line[1] != self._trained_on)
        self._followed = line = next(others, next(iter(found)))
        self._tell("evaluation", {"location": line[0], "samples": line[1], "batches": found[line].count})
        return True

    def release(self) -> None:
        """Take the hook away."""
        self._train_mode.release()


class _TrainMode:
    """Losses without gradients of models in train mode.

    That the model itself has computed them is seen by a hook of all modules, from the first such loss to the next
    training forward or step: averaged weights are evaluated by a copy while the model stays in train mode, and
    statistics are collected without a loss.
    """

    def __init__(self, recorder: Recorder, tell: Callable[[str, dict[str, Any]], None]) -> None:
        self._recorder, self._tell = recorder, tell
        self._modes = Modes()
        self._hook = recorder.entries.before_modules("probe:evaluation", self._entered)
        self._roots: list[weakref.ref[nn.Module]] = []
        self._ran = False
        self._count = self._last = self._looks = 0
        self._location: str | None = None

    def look(self, models: list[nn.Module]) -> None:
        """See a loss."""
        if self._hook.is_on:
            self._count += self._ran
            self._ran = False
        elif self._looks < _MAX_LOOKS and not internals.anything_compiled():
            roots = [model for model in models if self._modes.evaluates_in_train(model)]
            if roots:
                self._looks += 1
                self._roots, self._location = [weakref.ref(model) for model in roots], user_location()
                self._hook.on()

    def _entered(self, module: nn.Module, args: Any) -> None:
        del args
        if any(ref() is module for ref in self._roots):
            if torch.is_grad_enabled():
                self.release()
            elif module.training and not any(wrapper.in_forward for wrapper in self._recorder.wrappers):
                self._ran = True  # a forward of the wrapper is counted by itself

    def end(self) -> None:
        """An optimizer is about to step."""
        if self._location is None:
            return
        self.release()
        step = self._recorder.next_step()
        since, self._last = step - self._last, step
        if self._count + 1 >= EVALUATION and since > APART:  # the hook came after the first
            self._looks = 0
            self._tell("validation", {"forwards": self._count + 1, "since": since, "location": self._location})
        self._count, self._ran, self._location = 0, False, None

    def release(self) -> None:
        """Take the hook away."""
        self._hook.off()
