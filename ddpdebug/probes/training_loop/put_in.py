"""Weights that are put into a model for an evaluation, and that are still there as training goes on.

Averaged weights (EMA) and merged adapters are written into the model after a step, and taken out again after the
evaluation. A few parameters stand for all: they are looked at after each step, as an evaluation begins, and as the next
forward trains. A model whose weights are written between other steps as well is left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.probes.async_copy import glances
from ddpdebug.schema.announcements import LeftInWeights

#: Of the trained and of the frozen parameters of a model so many stand for all; of so many models.
_SAMPLE, _MODELS = 2, 2
#: What happens at one evaluation alone may be a change of the model (a layer is pruned).
_EVALUATIONS = 2
#: So many steps without an evaluation must have shown that the loop does not write the weights itself.
_PLAIN = 3

#: By model and name: what changes with a parameter's values.
_Look = Mapping[tuple[int, str], int | None]


class PutIn:
    """Follows the models that train, where their values are in host memory."""

    def __init__(self) -> None:
        self._roots: list[weakref.ref[torch.nn.Module]] = []
        self._names: dict[int, tuple[str, ...]] = {}  # by place of the model
        self._after: _Look | None = None  # what the last step has left; None once that was compared
        self._put: _Look = {}  # what an evaluation runs with that the step before has not left
        self._line: str | None = None  # of that evaluation
        self._evaluations, self._first, self._plain = 0, -1, 0
        self._over = False

    @property
    def waits(self) -> bool:
        """Whether an evaluation that begins now is the first one after a step."""
        return self._after is not None

    def after_step(self, roots: Sequence[torch.nn.Module]) -> None:
        """Note what a step has left."""
        if not self._are_known(roots):
            self._roots, self._names = [weakref.ref(root) for root in roots], {}
            self._evaluations, self._plain, self._over = 0, 0, False
        self._put = {}
        self._after = None if self._over else self._look(roots) or None

    def forget(self) -> None:
        """Compare nothing with what the last step has left: something else is known to have changed it."""
        self._after, self._put = None, {}

    def evaluates(self, roots: Sequence[torch.nn.Module], line: str | None) -> None:
        """Note what an evaluation runs with."""
        before, self._after = self._after, None
        if before is not None and self._are_known(roots):
            now = self._look(roots)
            self._put, self._line = {name: look for name, look in now.items() if before.get(name, look) != look}, line

    def trains(self, roots: Sequence[torch.nn.Module], step: int) -> LeftInWeights | None:
        """Return what an evaluation has left in the model that `step` trains."""
        before, self._after = self._after, None
        put, self._put = self._put, {}
        if not (before or put) or not self._are_known(roots):
            return None
        now = self._look(roots)
        if before is not None:  # no evaluation has run since
            self._over = any([before.get(name, look) != look for name, look in now.items()])
            self._plain += 1
            return None
        if any([now.get(name) != look for name, look in put.items()]):
            return None
        self._evaluations += 1
        self._first = step if self._evaluations == 1 else self._first
        if self._evaluations < _EVALUATIONS or self._plain < _PLAIN:
            return None
        self._over = True
        found = [_parameter(roots[place], name) for place, name in put]
        frozen = not any([p.requires_grad for p in found if p is not None])
        return LeftInWeights(
            names=tuple([name for _, name in put]), frozen=frozen, since=self._first, location=self._line
        )

    def _are_known(self, roots: Sequence[torch.nn.Module]) -> bool:
        """Return whether these are the models of the last step."""
        return len(roots) == len(self._roots) and all(
            [ref() is root for ref, root in zip(self._roots, roots, strict=True)]
        )

    def _look(self, roots: Sequence[torch.nn.Module]) -> _Look:
        held: dict[tuple[int, str], torch.Tensor] = {}
        for place, root in enumerate(roots[:_MODELS]):
            if place not in self._names:
                self._names[place] = _chosen(internals.named_parameters(root))
            for name in self._names[place]:
                parameter = _parameter(root, name)
                if parameter is not None and internals.is_plain(parameter):
                    held[place, name] = parameter
        seen = glances([*held.values()]) if held else None
        return {} if seen is None else dict(zip(held, seen(), strict=True))


def _chosen(named: Iterable[tuple[str, torch.nn.Parameter]]) -> tuple[str, ...]:
    """Return the names that stand for all, from the middle: first layers may be left out of an average."""
    kinds: tuple[list[str], list[str]] = ([], [])
    for name, parameter in named:
        kinds[parameter.requires_grad].append(name)
    return tuple([kind[len(kind) * (i + 1) // (_SAMPLE + 1)] for kind in kinds if kind for i in range(_SAMPLE)])


def _parameter(root: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return the parameter of a name; None where the model has none any more."""
    *path, last = name.split(".")
    module: torch.nn.Module | None = root
    for part in path:
        module = None if module is None else internals.own_child(module, part)
    return None if module is None else internals.parameters_of(module).get(last)
