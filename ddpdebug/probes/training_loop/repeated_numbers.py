"""Repeated random numbers in the epochs or steps of a run: a seed that is set again, mostly by accident.

And whether backward draws some: what is computed again for it (activation checkpointing) is to be the same again.
"""

from __future__ import annotations

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes.training_loop.eval_dropout import generators
from ddpdebug.probes.training_loop.modes import DROPOUTS
from ddpdebug.schema.announcements import RepeatedNumbers

#: Epochs in a row that begin in the same state.
_EPOCHS = 3
#: Backward passes of a run that are looked at, and such with the same numbers in a row until it is told.
_PASSES, _SAME = 8, 4


class Epochs:
    """The states of torch's generators at the start of epochs, and whether the steps after it draw from them."""

    def __init__(self) -> None:
        self._begin()
        self.told = False
        self._passes, self._same = 0, 1
        self._forward: tuple[int, ...] = ()  # as the newest forward began
        self._backward: tuple[int, ...] = ()  # as the newest backward began
        self._pass: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # both, of the newest pass

    def _begin(self) -> None:
        self._state: tuple[int, ...] = ()
        self._equal = 1
        self._in_step: tuple[int, ...] = ()  # as the first step of this epoch began
        self._steps = 0  # of this epoch
        self._draws = False

    def forward(self, root: torch.nn.Module) -> None:
        """Record the generators at the start of a training forward."""
        self._forward = generators(root) if self._passes < _PASSES else ()

    def backward_begins(self, root: torch.nn.Module | None) -> RepeatedNumbers | None:
        """Compare the generators before and after the last forward with those of the forward before."""
        self._backward = ()
        if root is None or self._passes >= _PASSES:
            return None
        self._passes += 1
        now = self._forward, generators(root)
        self._backward = now[1]
        draws = bool(now[0]) and now[0] != now[1]
        self._same = self._same + 1 if draws and now == self._pass else 1
        self._pass = now
        return RepeatedNumbers(steps=self._same, location=user_location()) if self._same == _SAME else None

    def backward_ends(self, root: torch.nn.Module | None) -> bool:
        """Return whether the backward of a model with dropout has drawn random numbers."""
        before, self._backward = self._backward, ()
        if root is None or not before or before == generators(root):
            return False
        return any(
            [isinstance(m, DROPOUTS) and m.p > 0 and internals.in_train_mode(m) for m in internals.modules(root)]
        )

    def forget(self) -> None:
        """Reset: another training begins (a fold, a trial), which may begin as the one before did."""
        self._begin()

    def begins(self, root: torch.nn.Module | None) -> RepeatedNumbers | None:
        """Compare the generators at the start of an epoch with those of the last epoch that had steps."""
        if root is None or self.told or (self._state and not self._steps):
            return None
        state = generators(root)
        self._equal = self._equal + 1 if state and state == self._state else 1
        self._state, self._steps = state, 0
        if self._equal < _EPOCHS or not self._draws:
            return None
        self.told = True
        return RepeatedNumbers(epochs=self._equal, location=user_location())

    def before_step(self, root: torch.nn.Module | None) -> None:
        """Check whether the generators have moved between the first and the second step of an epoch."""
        self._steps += 1
        if root is None or self._draws or not self._state or self._steps > 2:
            return
        state = generators(root)
        self._draws = self._steps == 2 and state != self._in_step
        self._in_step = state
