"""Optimizers that train copies of the model, as meta-learning's inner loop does: intended, on each rank.

A copy is known by what it holds: as its optimizer begins, after a step of the model, it is equal to the model bit for
bit, while the model has not been in a backward of its own and another optimizer holds it. Without a DDP the model is
what other optimizers hold. A second model that began as a copy and is no longer equal once the model has stepped is
trained beside it, and is looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.probes.built import Built
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, CopyTrained

#: Steps that copies may take before the model takes one; where they take more, the model is not what is trained.
MOST = 100
_SPOTS = 8  # elements in which a parameter is looked at for being constant


class _Known(NamedTuple):
    optimizer: weakref.ref[torch.optim.Optimizer]
    round: int  # number of the model's steps when it was looked at
    copies: bool


class ModelCopies:
    """Decides for an optimizer that is about to step whether it trains a copy of another model."""

    def __init__(self, bus: Bus, state: StepState, built: Built) -> None:
        self._bus, self._state, self._built = bus, state, built
        self._known: dict[int, _Known] = {}
        self._round = self._steps = 0  # steps of the model, and steps of copies since its newest

    def trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the coming step is that of a copy. Reads the parameters once after each step of the model."""
        if self._state.in_backward or not (self._state.wrappers or self._state.world > 1):
            return False  # one process alone is compared with nobody
        made = sum(watch.step for watch in self._state.watches)
        if made != self._round:
            self._round, self._steps = made, 0
            self._known = {key: known for key, known in self._known.items() if known.optimizer() is not None}
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer or known.round != made:
            known = _Known(weakref.ref(optimizer), made, self._copies(optimizer, known))
            self._known[id(optimizer)] = known
            if known.copies:
                self._bus.emit(CopyTrained(len(internals.params(optimizer))))
        self._steps += known.copies
        return known.copies and self._steps <= MOST

    def model_runs(self) -> bool:
        """Return whether the model itself has forwards or backwards for its coming step."""
        return self._state.syncs != self._state.synced or any([w.forwards for w in self._state.wrappers])

    def _copies(self, optimizer: torch.optim.Optimizer, before: _Known | None) -> bool:
        if before is not None and before.optimizer() is optimizer and not before.copies:
            return False
        params = internals.params(optimizer)
        if not params or self.model_runs():
            return False
        own = self._of_model(optimizer)
        if any([id(p) in own or p.device.type != "cpu" or not internals.is_plain(p) for p in params]):
            return False
        shapes = {_shape(p) for p in own.values()}
        if not all([_shape(p) in shapes for p in params]):
            return False
        plain = [p for p in own.values() if p.device.type == "cpu" and internals.is_plain(p)]
        contents = {(_shape(p), fingerprint.fingerprint(p)) for p in plain}
        if _all(lambda p: not _varies(p), params):  # zeros and ones are what other models begin with too
            return False
        return _all(lambda p: (_shape(p), fingerprint.fingerprint(p)) in contents, params)

    def _of_model(self, optimizer: torch.optim.Optimizer) -> Mapping[int, torch.Tensor]:
        """Return the parameters of what may be copied, by id: of the DDPs' models if another optimizer holds some."""
        others = [o for o in self._built.optimizers if o is not optimizer]
        held = {id(p): p for o in others for p in internals.params(o)}
        if not self._state.wrappers:
            return held
        models = [module for wrapper in self._state.wrappers if (module := wrapper.module()) is not None]
        own = {id(p): p for module in models for p in internals.parameters(module)}
        return own if not held.keys().isdisjoint(own) else {}


def _shape(p: torch.Tensor) -> tuple[object, ...]:
    return (p.dtype, *p.shape)


def _varies(p: torch.Tensor) -> bool:
    return len(set(fingerprint.row_fingerprints(p, p.itemsize, _SPOTS))) > 1


def _all(holds: Callable[[torch.Tensor], bool], tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether something holds of all tensors; those after the first of which it does not are not read."""
    for tensor in tensors:  # noqa: SIM110 - what a trace function raises as Python ends a generator is lost
        if not holds(tensor):
            return False
    return True
