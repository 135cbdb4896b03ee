"""Whether what was loaded, and what begins, belongs to one moment: model, optimizer, schedule.

Looked at as something is loaded, and as an optimizer takes its first step: nothing of it costs anything in other steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import is_a
from ddpdebug.probes.async_copy import glances
from ddpdebug.probes.training_events import Loaded
from ddpdebug.probes.training_loop.schedulers import Schedules, steps_of
from ddpdebug.schema.announcements import Restored

_SAMPLE = 4
_MAX_NAMES = 20
#: Sets of parameters whose optimizers are known, and loads that have not fitted.
_MAX_SETS = 64


class _Weights(NamedTuple):
    """Some parameters as they were loaded."""

    params: Sequence[tuple[int, internals.Seen]]
    values: Sequence[int]
    steps: int  # that all optimizers had taken then
    location: str | None


@dataclass(slots=True)
class _Trained:
    """What optimizers of one class have done with the same parameters, one after the other."""

    class_name: str
    newest: weakref.ref[torch.optim.Optimizer]
    first: internals.Seen  # of the parameters
    steps: int = 1  # of the newest
    keeps_state: bool = False
    begun: int = 0  # optimizers that began without the state of the one before


class Resume:
    """The loads of a process and the first steps of its optimizers.

    Args:
        tell: announces a fact of this step.
    """

    def __init__(self, tell: Callable[[Restored], None], schedules: Schedules) -> None:
        self._tell, self._schedules = tell, schedules
        self._unfitted: list[tuple[Restored, dict[str, int]]] = []  # with the parameters that another load may bring
        self._trained: dict[int, _Trained] = {}  # by the parameters
        self._stepping: _Trained | None = None  # the newest
        self._fresh: tuple[weakref.ref[torch.optim.Optimizer], str, int] | None = None  # schedule, its position
        self._loaded: _Weights | None = None  # by the newest load
        self._loads = 0

    def loaded(self, event: Loaded) -> None:
        """Take a load: which names have fitted, and what the parameters are then."""
        if not is_a(event.thing, torch.nn.Module) or not is_a(event.result, tuple):
            return
        self._loads += 1
        params = dict(internals.named_parameters(event.thing))
        missing, unexpected = (set(names) for names in event.result)
        fitting = [p for name, p in params.items() if name not in missing]
        fitted = {*map(id, fitting)}
        pending = [(said, {n: i for n, i in lacking.items() if i not in fitted}) for said, lacking in self._unfitted]
        self._unfitted = [(said, lacking) for said, lacking in pending if lacking]
        lacking = [name for name in params if name in missing]
        names = _renamed(lacking, unexpected) or ([] if fitting else lacking)
        if names and len(self._unfitted) < _MAX_SETS:
            said = Restored(kind="names", class_name=event.what, location=event.location, others=len(unexpected))
            said = replace(said, fitted=len(fitting), number=len(params))
            self._unfitted.append((said, {name: id(params[name]) for name in names}))
        chosen = fitting[:: max(1, len(fitting) // _SAMPLE)][:_SAMPLE]
        if values := _values(chosen):
            seen = [(id(p), internals.Seen(p)) for p in chosen]
            self._loaded = _Weights(seen, values, self._schedules.taken, event.location)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer that is about to step."""
        for said, lacking in self._unfitted:
            self._tell(replace(said, names=tuple(lacking)[:_MAX_NAMES]))
        self._unfitted.clear()
        number = self._schedules.taken_by(optimizer)
        if not number:
            self._begins(optimizer)
            return
        if (known := self._stepping) is not None and known.newest() is optimizer:
            known.steps = number + 1
            known.keeps_state = known.keeps_state or bool(internals.state(optimizer))
        if self._fresh is not None and self._fresh[0]() is optimizer:
            (_, schedule, calls), self._fresh = self._fresh, None
            if internals.state(optimizer):  # it is of those that have one
                self._tell(_about(optimizer, "optimizer", schedule=schedule, calls=calls))

    def _begins(self, optimizer: torch.optim.Optimizer) -> None:
        params = internals.params(optimizer)
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded.steps == self._schedules.taken:
            own = {id(p): p for p in params}
            same = [p for i, seen in loaded.params if (p := own.get(i)) is not None and seen.is_of(p)]
            now = _values(same) if len(same) == len(loaded.params) else None
            if now is not None and all([one != other for one, other in zip(loaded.values, now, strict=True)]):
                self._tell(_about(optimizer, "overwritten", location=loaded.location))
        empty = not internals.state(optimizer)
        for schedule, calls in self._schedules.of(optimizer) if empty else ():
            moved = vars(schedule).get("last_epoch")
            if isinstance(moved, int) and moved - calls > 1:
                self._fresh = weakref.ref(optimizer), type(schedule).__name__, moved
        if steps := steps_of(optimizer):
            self._tell(_about(optimizer, "resumed", steps=steps))
        if params:
            self._follow(optimizer, params, empty=empty)

    def _follow(self, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], *, empty: bool) -> None:
        """Compare an optimizer with those before it that had the same parameters."""
        name, key = type(optimizer).__name__, hash(tuple([id(param) for param in params]))
        before, loads, self._loads = self._trained.get(key), self._loads, 0
        begun = 0
        if before is not None and before.class_name == name and before.first.is_of(params[0]):
            again = before.keeps_state and empty and not loads
            begun = before.begun + 1 if again else 0
            if again:
                self._tell(_about(optimizer, "rebuilt", calls=begun, steps=before.steps))
        if len(self._trained) >= _MAX_SETS:
            self._trained.clear()
        self._stepping = _Trained(name, weakref.ref(optimizer), internals.Seen(params[0]), begun=begun)
        self._trained[key] = self._stepping


def _about(optimizer: torch.optim.Optimizer, kind: Any, **more: Any) -> Restored:
    return Restored(kind=kind, class_name=type(optimizer).__name__, **more)


def _renamed(missing: Sequence[str], unexpected: Collection[str]) -> list[str]:
    """Return the names that would fit but for what stands before them, on the one side or the other."""
    shorter = {name.partition(".")[2] for name in unexpected}
    return [name for name in missing if name in shorter or name.partition(".")[2] in unexpected]


def _values(params: Sequence[torch.Tensor]) -> list[int] | None:
    """Return what changes with the values; None where that is not known without waiting for a device."""
    looked = glances(params)
    return None if looked is None else [*looked()]
