"""Models that train in one process without a DDP, for the rules about the training loop."""

from __future__ import annotations

import weakref
from typing import ClassVar

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.probes.step_state import StepState


class PlainModel:
    """A model without a DDP, as it was when first seen; the counterpart of `ddp_wrapper.Wrapper`."""

    ignored: ClassVar[frozenset[str]] = frozenset()  # all of its parameters count

    def __init__(self, module: torch.nn.Module, index: int) -> None:
        self.index, self.module = index, weakref.ref(module)
        self.wrapped = {id(p): name for name, p in internals.named_parameters(module)}

    @property
    def prefix(self) -> str:
        """The prefix of its parameters' names if there are several models."""
        return f"model{self.index}"


class PlainModels:
    """The models of this process without a DDP, numbered in order of appearance; none if several ranks train."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._known: list[PlainModel] = []
        self._made = 0

    def living(self) -> list[PlainModel]:
        """Return the followed models that still live."""
        if self._state.wrappers or (self._state.world > 1 and not self._state.is_sharded):
            return []
        self._known = [model for model in self._known if model.module() is not None]
        for module in self._state.models():
            if all([model.module() is not module for model in self._known]):
                self._known.append(PlainModel(module, self._made))
                self._made += 1
        return self._known

    def index(self, module: torch.nn.Module) -> int | None:
        """Return the number of a model; None if it is not followed."""
        return next(iter([model.index for model in self.living() if model.module() is module]), None)
