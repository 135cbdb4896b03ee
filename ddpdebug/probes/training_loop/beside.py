"""Models beside the trained one: teachers, references, averages. Each should stay constant, or follow the model.

One that stays has nothing to learn from dropout and batch statistics, and is to run in eval mode; one that follows is
to follow with its statistics as well. Looked at are norms and dropouts in checked steps: in the first ones, and after
that between a step and the next forward that trains. Values are compared in host memory only, where that waits for
nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes.async_copy import glances
from ddpdebug.probes.entries import Entries
from ddpdebug.probes.training_loop.modes import DROPOUTS, NORMS, changes
from ddpdebug.schema.announcements import TrainModeValidation

#: Steps in which all calls are looked at, and of these such with a call of the same model until it is told.
_FIRST, _ENOUGH = 8, 3
#: The step until which a copy of the model that is trained may be written for the first time.
_PATIENT = 40
_SAMPLE, _MAX_PARTS, _MAX_NAMES = 4, 16, 20
#: Share of the newest batch in running statistics from which on they hold hardly anything else.
_LAST = 0.9


@dataclass(slots=True)
class _Part:
    """A model beside the trained one, or as much of it as is not trained."""

    module: weakref.ref[nn.Module]
    copy: bool  # it has the shapes of a model that is trained
    values: Sequence[int]  # of some parameters, as it was first seen
    statistics: Sequence[int]
    location: str | None
    seen: set[int] = field(default_factory=set)  # steps in which it ran in train mode
    names: dict[str, None] = field(default_factory=dict)
    evaluated: bool = False  # its statistics were in use
    over: bool = False


class Beside:
    """The probe of forwards of models that are not trained.

    Args:
        roots: returns the models that are trained.
        tell: takes what is announced.
    """

    def __init__(
        self,
        entries: Entries,
        roots: Callable[[], Sequence[nn.Module]],
        tell: Callable[[TrainModeValidation], None],
    ) -> None:
        self._built, self._roots, self._tell = entries.built, roots, tell
        self._hook = entries.before_modules("probe:beside", self._look)
        self._own: set[int] = set()  # modules of the models that are trained
        self._parts: dict[int, _Part] = {}
        self._places: dict[int, tuple[_Part, str] | None] = {}  # by module: what it belongs to, its path there
        self._norms: dict[int, tuple[str, set[int]]] = {}  # of the models that are trained: what is said, steps
        self._frozen: dict[int, Sequence[int] | None] = {}  # values of the frozen ones, as each was first seen
        self._step = 0

    def after_step(self, step: int, *, looks: bool) -> None:
        """Observe module calls from the end of a step on, if the next step is checked."""
        self._step = step
        if step == 0 or not self._own:
            self._own = {id(m) for root in self._roots() for m in internals.modules(root)}
        for part in list(self._parts.values()) if step <= _PATIENT else ():
            self._judge(part)
        if step >= _FIRST and self._norms:
            self._say_own()
        if looks and self._own and not internals.anything_compiled():
            self._hook.on((*DROPOUTS, *NORMS))
        else:
            self._hook.off()

    def trains(self) -> None:
        """Note that a training forward begins: after the first steps, observation ends here until the next step."""
        if self._step > _FIRST:
            self._hook.off()

    def release(self) -> None:
        """Remove the hook."""
        self._hook.off()

    def _look(self, module: nn.Module, args: Any) -> None:
        del args
        if id(module) in self._own:
            self._look_at_own(module)
            return
        if id(module) not in self._places:
            self._places[id(module)] = None
            self._place(module)
        if (place := self._places[id(module)]) is None or place[0].over:
            return
        part, name = place
        model = part.module()
        if model is None or not changes(module):
            return
        if internals.in_train_mode(module):
            if internals.in_train_mode(model):  # else somebody has chosen this module
                part.names[name] = None
                part.seen.add(self._step)
        elif isinstance(module, NORMS) and not part.evaluated:
            part.names[name] = None
            part.evaluated = True
            self._judge(part)

    def _look_at_own(self, module: nn.Module) -> None:
        """Look at a norm of a model that is trained: in a forward that trains, or in any where it is frozen."""
        if not isinstance(module, NORMS) or not internals.in_train_mode(module):
            return
        own, momentum = list(internals.own_parameters(module)), internals.own_attribute(module, "momentum", None)
        if self._step >= _FIRST or momentum is None or not changes(module):
            return
        trains = any([p.requires_grad for p in own])
        if trains and not torch.is_grad_enabled():
            return
        what = ("last" if momentum >= _LAST else "") if trains else "frozen" if own and momentum else ""
        if what == "frozen":
            values = _values(own)
            # a copy that follows, as a momentum encoder does, keeps statistics of its own; on a device nobody knows
            unknown = values is None and not torch.is_grad_enabled()
            if unknown or values != self._frozen.setdefault(id(module), values):
                what = ""
        before, seen = self._norms.get(id(module), (what, set()))
        self._norms[id(module)] = (what if before == what else "", seen | {self._step})

    def _say_own(self) -> None:
        """Say which norms of the models that are trained hold statistics that they should not."""
        for root in self._roots():
            table = dict(internals.named_modules(root))
            said = {name: self._norms.get(id(m), ("", set())) for name, m in table.items()}
            for what in ("frozen", "last"):
                names = [name for name, (kind, seen) in said.items() if kind == what and len(seen) >= _ENOUGH]
                if what == "frozen":  # with what is around them: of single ones somebody has chosen the mode
                    parts = [(name, table.get(name.rpartition(".")[0])) for name in names]
                    names = [name for name, part in parts if part is not None and _is_frozen_part(part)]
                if names:
                    self._tell(TrainModeValidation(beside=what, forwards=_FIRST, names=tuple(names[:_MAX_NAMES])))
        self._norms.clear()
        self._frozen.clear()

    def _place(self, module: nn.Module) -> None:
        """Find the model that a module belongs to: the largest one around it that no optimizer has anything of."""
        held = {id(p) for o in self._built.optimizers for p in internals.params(o)}
        for root in self._built.outermost():
            inside = list(internals.named_modules(root))
            path = next(iter([name for name, m in inside if m is module]), None)
            if path is None:
                continue
            for name, model in inside:  # from the outside in
                if name and not f"{path}.".startswith(f"{name}."):
                    continue
                params = list(internals.parameters(model))
                if not params:
                    return
                if all([id(p) not in held for p in params]):
                    if (part := self._new(model, params)) is not None:
                        self._places.update({id(m): (part, path) for path, m in internals.named_modules(model)})
                    return

    def _new(self, model: nn.Module, params: Sequence[torch.Tensor]) -> _Part | None:
        values, statistics = _values(params), _values(_statistics(model))
        if values is None or statistics is None or len(self._parts) >= _MAX_PARTS:
            return None
        shapes = [p.shape for p in params]
        copy = any([[p.shape for p in internals.parameters(root)] == shapes for root in self._roots()])
        part = _Part(weakref.ref(model), copy, values, statistics, user_location())
        self._parts[id(model)] = part
        return part

    def _judge(self, part: _Part) -> None:
        model = part.module()
        trains = len(part.seen) >= _ENOUGH and self._step >= (_PATIENT if part.copy else 0)
        if model is None or part.over or not (trains or part.evaluated):
            return
        values = _values(list(internals.parameters(model)))
        follows = values != part.values
        if trains:
            part.over = True
            if not follows:
                self._say(part, model, "stays", len(part.seen))
            return
        part.evaluated = False
        if follows and part.copy and _values(_statistics(model)) == part.statistics and self._collects():
            part.over = True
            self._say(part, model, "follows", 1)

    def _collects(self) -> bool:
        """Return whether the statistics of a model that is trained have changed with its steps."""
        return any(
            [
                isinstance(m, NORMS) and m.track_running_stats and m.num_batches_tracked is not None
                and int(m.num_batches_tracked) >= _ENOUGH
                for root in self._roots() for m in internals.modules(root)
            ]
        )  # fmt: skip

    def _say(self, part: _Part, model: nn.Module, what: str, forwards: int) -> None:
        names = tuple([type(model).__name__, *part.names][:_MAX_NAMES])
        self._tell(TrainModeValidation(forwards=forwards, location=part.location, beside=what, names=names))


def _is_frozen_part(part: nn.Module) -> bool:
    params = list(internals.parameters(part))
    return any([p.dim() > 1 for p in params]) and not any([p.requires_grad for p in params])


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    norms = [m for m in internals.modules(model) if isinstance(m, NORMS)]
    return [m.running_mean for m in norms if m.running_mean is not None]


def _values(tensors: Sequence[torch.Tensor]) -> Sequence[int] | None:
    chosen = tensors[:: max(1, len(tensors) // _SAMPLE)][:_SAMPLE]
    looked = glances([t.detach() for t in chosen])
    return None if looked is None else [*looked()]
