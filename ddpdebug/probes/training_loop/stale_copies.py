"""Copies of the trained model that only evaluations use: averages (EMA, SWA), which should follow the model.

A copy that takes part in the steps themselves may stay as it is: a teacher, a reference, a target network.
Values are compared in host memory only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes.async_copy import glances
from ddpdebug.probes.training_loop.samples import sample_rows
from ddpdebug.schema.announcements import TrainModeValidation

#: Evaluations after which a copy that has not changed is told; at the end of the run the least that show it.
_ENOUGH, _LEAST = 4, 2
_SAMPLE, _MAX_COPIES = 4, 64


@dataclass(slots=True)
class _Copy:
    module: weakref.ref[nn.Module]
    values: Sequence[int] | None  # of some parameters, as it was first seen; None: it is no copy, or is not looked at
    location: str | None
    first: int  # step
    newest: int
    evaluations: int = 1
    places: Sequence[int] = ()  # of these parameters
    is_new: bool = False  # it says itself that it was never updated
    rows: frozenset[int] = frozenset()  # fingerprints of the samples that it was given last


class StaleCopies:
    """The probe of copies that run in eval mode without gradients.

    Args:
        apart: steps between two evaluations; what runs more often belongs to the steps.
    """

    #: Classes that are copies beside those of the trained models.
    kinds = (AveragedModel,)

    def __init__(self, apart: int) -> None:
        self._apart = apart
        self._copies: dict[int, _Copy] = {}

    def waits(self, step: int) -> bool:
        """Return whether this step's forwards must be observed: a new copy in them would be a part of the steps."""
        return any([copy.values is not None and step - copy.first <= 1 for copy in self._copies.values()])

    def ran(
        self,
        module: nn.Module,
        step: int,
        roots: Sequence[weakref.ref[nn.Module]],
        tensors: Callable[[], Sequence[torch.Tensor]] = tuple,
    ) -> TrainModeValidation | None:
        """Examine a model that has run on some tensors; return the announcement that is due, if any."""
        if internals.in_train_mode(module):
            return None
        known = self._copies.get(id(module))
        if known is None or known.module() is not module:
            self._add(module, step, roots)
            if (new := self._copies.get(id(module))) is not None and new.values is not None:
                new.rows = frozenset(sample_rows(tensors()))
            return None
        if known.values is None or known.newest == step:
            return None
        if step - known.newest < self._apart or _values(module, known.places) != known.values:
            known.values = None
            return None
        known.newest, known.evaluations, known.rows = step, known.evaluations + 1, frozenset(sample_rows(tensors()))
        return _said(known) if known.evaluations == _ENOUGH else None

    def trains(self, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Note what is trained on: a copy that was given the same before takes part, as the reference of a rollout."""
        waiting = [copy for copy in self._copies.values() if copy.rows and copy.values is not None]
        rows = {*sample_rows(tensors())} if waiting else set()
        for copy in waiting:
            if not rows.isdisjoint(copy.rows):
                copy.values = None

    def takes_part(self, module: nn.Module) -> None:
        """Note that a model has run with gradients, as a part of a loss."""
        if (known := self._copies.get(id(module))) is not None:
            known.values = None

    def _add(self, module: nn.Module, step: int, roots: Sequence[weakref.ref[nn.Module]]) -> None:
        if len(self._copies) >= _MAX_COPIES:
            self._copies = {key: copy for key, copy in self._copies.items() if copy.module() is not None}
        if len(self._copies) >= _MAX_COPIES or not step:
            return
        models = [model for ref in roots if (model := ref()) is not None]
        own = {id(p) for model in models for p in internals.parameters(model)}
        params = list(internals.parameters(module))
        shapes = [p.shape for p in params]
        tables = [list(internals.parameters(model)) for model in models]
        alike = [table for table in tables if [p.shape for p in table] == shapes]
        trained = [i for i, p in enumerate(alike[0]) if p.requires_grad] if alike else []
        copies = bool(trained) and own.isdisjoint(map(id, params))
        copy = _Copy(weakref.ref(module), None, user_location(), step, step)
        if copies:
            copy.places = trained[:: max(1, len(trained) // _SAMPLE)][:_SAMPLE]
            copy.values = _values(module, copy.places)
        if isinstance(module, AveragedModel):
            copy.is_new = _is_new(module)
            self.takes_part(module.module)  # which has run within it
        self._copies[id(module)] = copy

    def at_end(self) -> Iterator[TrainModeValidation]:
        """Yield the announcements that only the whole run allows, of copies not announced before."""
        for copy in self._copies.values():
            shown = copy.is_new or copy.evaluations >= _LEAST
            if copy.values is not None and shown and copy.evaluations < _ENOUGH:
                yield _said(copy)


def _said(copy: _Copy) -> TrainModeValidation:
    module = copy.module()
    names = () if module is None else (type(module).__name__,)
    return TrainModeValidation(forwards=copy.evaluations, location=copy.location, beside="never", names=names)


def _is_new(average: AveragedModel) -> bool:
    return internals.is_plain(average.n_averaged) and average.n_averaged.is_cpu and not int(average.n_averaged)


def _values(module: nn.Module, places: Sequence[int]) -> Sequence[int] | None:
    params = list(internals.parameters(module))
    with torch.no_grad():
        looked = glances([internals.held_here(params[place]).detach() for place in places if place < len(params)])
    return None if looked is None else [*looked()]
