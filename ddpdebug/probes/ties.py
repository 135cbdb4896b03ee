"""Parameters that two modules share, recorded as the second one gets what the first one has. Nothing is kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import NamedTuple

import torch

from ddpdebug import torch_internals as internals

#: Parameters whose places are known; of more, those that came before are forgotten.
_MOST = 1 << 16


class _Place(NamedTuple):
    key: tuple[int, str]  # id of the module, and the parameter's name in it
    module: weakref.ref[torch.nn.Module]

    def parameter(self) -> torch.Tensor | None:
        module = self.module()
        return None if module is None else internals.parameters_of(module).get(self.key[1])


class Ties:
    """The pairs of places that held one parameter, as long as nobody has given either of them another by hand."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}  # id of a parameter -> the module that got it last
        self._pairs: list[tuple[_Place, _Place]] = []

    def given(self, module: torch.nn.Module, name: str, parameter: torch.Tensor) -> None:
        """Record that a module gets a parameter."""
        place = _Place((id(module), name), weakref.ref(module))
        self._pairs = [pair for pair in self._pairs if place.key not in {pair[0].key, pair[1].key}]
        known = self._places.get(id(parameter))
        if known is not None and known.key != place.key and known.parameter() is parameter:
            self._pairs.append((known, place))
        if len(self._places) >= _MOST:
            self._places.clear()
        self._places[id(parameter)] = place

    def broken(self, trained: Collection[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the pairs of parameters, of those with these ids, that were one and the same."""
        pairs = [(one.parameter(), other.parameter()) for one, other in self._pairs]
        return [
            (one, other)
            for one, other in pairs
            if one is not None and other is not None and one is not other
            if id(one) in trained and id(other) in trained
        ]
