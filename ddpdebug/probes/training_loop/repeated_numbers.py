"""Whether the epochs of a run draw the same random numbers: a seed that is set again and again, mostly by accident."""

from __future__ import annotations

import torch

from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes.training_loop.eval_dropout import generators
from ddpdebug.schema.announcements import RepeatedNumbers

#: Epochs in a row that begin in the same state.
_EPOCHS = 3


class Epochs:
    """The states of torch's generators as epochs begin, and whether the steps after that draw from them."""

    def __init__(self) -> None:
        self._begin()
        self.told = False

    def _begin(self) -> None:
        self._state: tuple[int, ...] = ()
        self._equal = 1
        self._in_step: tuple[int, ...] = ()  # as the first step of this epoch began
        self._steps = 0  # of this epoch
        self._draws = False

    def forget(self) -> None:
        """Begin anew: another training begins (a fold, a trial), which may begin as the one before did."""
        self._begin()

    def begins(self, root: torch.nn.Module | None) -> RepeatedNumbers | None:
        """Look at an epoch that begins; one without steps is none."""
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
        """See whether the second step of an epoch begins in another state than the first."""
        self._steps += 1
        if root is None or self._draws or not self._state or self._steps > 2:
            return
        state = generators(root)
        self._draws = self._steps == 2 and state != self._in_step
        self._in_step = state
