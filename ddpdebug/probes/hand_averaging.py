"""Parameters that the script averages over ranks itself: federated rounds, DiLoCo, local SGD without a library.

Ranks that take different numbers of steps in a round never agree in steps of one number. What shows the averaging is
that, between a step and the next backward, collectives of the script carry tensors of all the parameters' shapes, or
one of as many elements. Of sharded parameters these are the rank's parts, and they are added up: what gathers such
parts may be FSDP2 itself, or a checkpoint.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import BackwardBegan, Bus, StepEnded, StepPassed

#: Tensors that are remembered, and elements of a model that are too few to tell them from a list of losses.
_MOST, _LEAST = 8192, 32
_ADDING = frozenset({"all_reduce", "all_reduce_coalesced", "reduce"})


class HandAveraging:
    """The probe of such collectives, in models without DDP; it is told of the calls by `CollectiveNotes`."""

    def __init__(self, bus: Bus, state: StepState) -> None:
        self._state = state
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None  # that stepped last, until a backward begins
        self._wanted: list[torch.Size] = []  # of its parameters, known when something is carried: it may end with that
        self._carried: list[torch.Size] = []
        for ended in (StepEnded, StepPassed):
            bus.on("probe:collectives", ended, self._ended)
        bus.on("probe:collectives", BackwardBegan, self._begins)

    def carries(self, operation: str, given: Any) -> None:
        """Note the tensors of a collective; what is broadcast is not averaged: a checkpoint may be."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None or self._state.averages or self._state.wrappers or operation == "broadcast":
            return
        params = internals.params(optimizer)
        if operation not in _ADDING and internals.any_distributed(params):
            return
        self._wanted = self._wanted or [internals.held_here(p).shape for p in params if p.requires_grad]
        tensors = given if isinstance(given, list | tuple) else (given,)
        self._carried += [t.shape for t in tensors if isinstance(t, torch.Tensor)][: _MOST - len(self._carried)]

    def _ended(self, event: StepEnded | StepPassed) -> None:
        if self._wanted and self._is_outer(event.optimizer):
            return
        self._optimizer = weakref.ref(event.optimizer)
        self._forget()

    def _is_outer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer steps copies of the parameters, by averages that are carried before it does."""
        watches = [watch for watch in self._state.watches if watch.is_loose]
        return any([one is optimizer for watch in watches for one in watch.optimizers()])

    def _forget(self) -> None:
        self._wanted, self._carried = [], []

    def _begins(self, _: BackwardBegan) -> None:
        self._optimizer, number = None, sum([shape.numel() for shape in self._wanted])
        flat = number >= _LEAST and any([shape.numel() == number for shape in self._carried])
        each = len(self._wanted) > 1 and Counter(self._wanted) <= Counter(self._carried)
        self._state.averages |= flat or each
        self._forget()
