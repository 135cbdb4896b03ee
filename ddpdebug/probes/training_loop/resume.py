"""Consistency of loaded state: model, average, optimizer, schedule and loss scaler should be of one moment.

Looked at as something is loaded, and as an optimizer takes its first steps: nothing of it costs anything in others.
What keeps state from step to step lives as long as the training: what is made anew again and again does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import attributes_of, is_a
from ddpdebug.probes.async_copy import glances
from ddpdebug.probes.delivered_items import sampler_of
from ddpdebug.probes.training_events import CheckpointRead, EpochBegan, Loaded, ScalerSteps
from ddpdebug.probes.training_loop.schedulers import ENDED, Schedules, length_of, steps_of
from ddpdebug.schema.announcements import Restored

_SAMPLE = 4
#: Steps of a model after a load in which what follows it is looked for.
_FOLLOWED = 4
_MAX_NAMES = 20
#: First epoch that is one of a run that goes on: where epochs are counted from 1, that is where a run begins.
_GOES_ON = 2
#: Between the name of an optimizer in a checkpoint, and the names of what it has state of.
_STATE = ".state."
#: Sets of parameters whose optimizers are known, and loads that have not fitted.
_MAX_SETS = 64


class _Weights(NamedTuple):
    """Some parameters as they were loaded."""

    params: Sequence[tuple[int, internals.Seen]]
    values: Sequence[int]
    steps: int  # that all optimizers had taken then
    location: str | None


class _Beside(NamedTuple):
    """A model of the same shape as one that was loaded, which nothing was loaded into: an average, if it follows."""

    module: weakref.ref[torch.nn.Module]
    loaded: weakref.ref[torch.nn.Module]
    values: Sequence[int]  # of some of its parameters, as the load ended, or as the first step after it began
    location: str | None


@dataclass(slots=True)
class _Trained:
    """What optimizers of one class have done with the same parameters, one after the other; or loss scalers."""

    class_name: str
    newest: weakref.ref[Any]
    first: internals.Seen  # of the parameters
    steps: int = 1  # of the newest
    keeps_state: bool = False
    begun: int = 0  # optimizers that began without the state of the one before


class Resume:
    """The loads of a process and the first steps of its optimizers.

    Args:
        tell: announces a fact of this step.
        modules: returns the outermost modules of the process.
        writes: returns how often some of these parameters, by their ids, were written since their optimizer stepped.
    """

    def __init__(
        self,
        tell: Callable[[Restored], None],
        schedules: Schedules,
        modules: Callable[[], Sequence[torch.nn.Module]] = tuple,
        writes: Callable[[Collection[int]], Collection[int]] = tuple,
    ) -> None:
        self._tell, self._schedules, self._modules, self._writes = tell, schedules, modules, writes
        self._into: list[int] = []  # ids of the modules that were loaded since the newest step
        self._filled: dict[int, internals.Seen] = {}  # the first parameters of modules that were loaded
        self._beside: list[_Beside] = []
        self._after_load = 0  # steps of the model that was loaded
        self._scaled: dict[int, _Trained] = {}  # by the optimizer
        self._unfitted: list[tuple[Restored, dict[str, int]]] = []  # with the parameters that another load may bring
        self._trained: dict[int, _Trained] = {}  # by the parameters
        self._stepping: _Trained | None = None  # the newest
        #: With its schedule, the position of that, and what of its state was left in a checkpoint.
        self._fresh: tuple[weakref.ref[torch.optim.Optimizer], str | None, int, set[str]] | None = None
        self._unread: list[tuple[Restored, _Weights]] = []  # parameters that a checkpoint did not have
        self._left: tuple[dict[int, internals.Seen], set[str]] = {}, set()  # parameters; kinds of state of theirs
        self._epoch = 0  # that a sampler was told before the first step
        self._loaded: _Weights | None = None  # by the newest load
        self._loads = 0

    def loaded(self, event: Loaded) -> None:
        """Record a load: the names that matched, and the parameters' values after it."""
        if is_a(event.thing, torch.optim.Optimizer):
            self._look_at_names(event)
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
        chosen = _some(fitting)
        if values := _values(chosen):
            seen = [(id(p), internals.Seen(p)) for p in chosen]
            self._loaded = _Weights(seen, values, self._schedules.taken, event.location)
            self._look_beside(event, fitting)
        self._into.append(id(event.thing))
        if fitting and self._is_own(event, params):
            self._tell(Restored(kind="itself", class_name=event.what, location=event.location, number=len(params)))

    def read(self, event: CheckpointRead) -> None:
        """Record the parameters that a checkpoint does not have, and what it has of an optimizer that nobody wants."""
        known = {name: p for module in self._modules() for name, p in internals.named_parameters(module)}
        wanted = {name: p for name in event.wanted if (p := known.get(_tail(name, known))) is not None}
        others = [name for name in event.stored if name not in event.wanted]
        lacking = sorted(name for name in wanted if name not in event.stored)
        names = _renamed(lacking, [name for name in others if _STATE not in name]) or (
            lacking if len(lacking) == len(wanted) else []
        )
        if names and len(self._unread) < _MAX_SETS:
            said = Restored(kind="names", class_name="checkpoint", location=event.location, others=len(others))
            tails = tuple([_tail(name, known) for name in names])[:_MAX_NAMES]
            said = replace(said, names=tails, fitted=len(wanted) - len(lacking), number=len(wanted))
            chosen = _some([wanted[name] for name in names])
            if values := _values([internals.held_here(p) for p in chosen]):
                seen = [(id(p), internals.Seen(p)) for p in chosen]
                self._unread.append((said, _Weights(seen, values, self._schedules.taken, event.location)))
        if any([_STATE in name for name in event.wanted]):
            self._left = {}, set()
        elif wanted and not lacking:
            kinds = {name.rpartition(".")[2] for name in others if _STATE in name}
            self._left = {id(p): internals.Seen(p) for p in wanted.values()}, kinds

    def _still_unread(self, optimizer: torch.optim.Optimizer) -> None:
        """Say which parameters a checkpoint did not have and nothing has given other values since."""
        own = {id(p): p for p in internals.params(optimizer)}
        for said, weights in self._unread:
            same = [p for i, seen in weights.params if (p := own.get(i)) is not None and seen.is_of(p)]
            if len(same) == len(weights.params) and weights.steps == self._schedules.taken:
                now = _values([internals.held_here(p) for p in same])
                if now == weights.values:
                    self._tell(said)
        self._unread.clear()

    def _look_at_names(self, event: Loaded) -> None:
        """See whether an optimizer that knows names got the state of other parameters: torch goes by their order."""
        known = {
            id(parameter): _bare(name)
            for module in self._modules()
            for name, parameter in internals.named_parameters(module)
        }
        pairs = list[tuple[str | None, str]]()
        for group in internals.groups(event.thing):
            names: Any = group.get("param_names")
            for parameter, name in zip(group["params"], names if type(names) in {list, tuple} else (), strict=False):
                pairs.append((known.get(id(parameter)), _bare(str(name))))
        wrong = [own for own, named in pairs if own is not None and own != named]
        if wrong and {own for own, _ in pairs} == {named for _, named in pairs}:  # else they are named by other roots
            said = Restored(kind="order", class_name=event.what, location=event.location, number=len(wrong))
            self._tell(replace(said, names=tuple(wrong[:_MAX_NAMES])))

    def _is_own(self, event: Loaded, params: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a load has given a model nothing but what it had, as it was after the newest step."""
        given = event.given if is_a(event.given, dict) else {}
        same = [
            internals.is_plain(p) and is_a(given.get(name), torch.Tensor) and given[name].data_ptr() == p.data_ptr()
            for name, p in params.items()
        ]
        written = {*self._writes({*map(id, params.values())})} if all(same) else set()
        return written == {self._into.count(id(event.thing))}

    def _look_beside(self, event: Loaded, fitting: Sequence[torch.Tensor]) -> None:
        """Note which models of the same shape are left out by a load."""
        own, shapes = {*map(id, fitting)}, [p.shape for p in fitting]
        if len(self._filled) >= _MAX_SETS:
            self._filled.clear()
        self._filled[id(fitting[0])] = internals.Seen(fitting[0])
        self._after_load = 0
        for module in self._modules():
            params = list(internals.parameters(module))
            first = self._filled.get(id(params[0])) if params else None
            if [p.shape for p in params] != shapes or not own.isdisjoint(map(id, params)):
                continue
            values = _values(_some(params)) if first is None or not first.is_of(params[0]) else None
            if values is not None and len(self._beside) < _MAX_SETS:
                self._beside.append(_Beside(weakref.ref(module), weakref.ref(event.thing), values, event.location))

    def _follow_beside(self, optimizer: torch.optim.Optimizer) -> None:
        """See which of these follow the model that was loaded: they begin from weights that nobody has trained."""
        held, going, steps = {*map(id, internals.params(optimizer))}, list[_Beside](), 0
        for seen in self._beside:
            module, loaded = seen.module(), seen.loaded()
            params, own = ([] if part is None else list(internals.parameters(part)) for part in (module, loaded))
            if not params or not own:
                continue
            if held.isdisjoint(map(id, own)):
                going.append(seen)  # another model's step
                continue
            steps = 1
            if not self._after_load and self._schedules.taken_by(optimizer):
                continue  # a load in the middle of training: weights that were put aside, or an average, for a while
            first = self._filled.get(id(params[0]))
            filled = (first is not None and first.is_of(params[0])) or not held.isdisjoint(map(id, params))
            now = _values(_some(params))
            if filled or now is None or now == _values(_some(own)):
                continue  # it was loaded, trains, or takes the model's weights as they are
            if now == seen.values:
                going.append(seen)
            elif self._after_load:  # before it was written by other means
                self._tell(Restored(kind="average", class_name=type(module).__name__, location=seen.location))
        self._after_load += steps
        self._beside = going if self._after_load < _FOLLOWED else []

    def scaler_steps(self, event: ScalerSteps) -> None:
        """Record the loss scaler of an optimizer; a new scaler has lost what the old one learned about the scale."""
        optimizer = event.optimizer
        known = self._scaled.get(id(optimizer))
        params = internals.params(optimizer)
        if known is not None and known.newest() is event.scaler:
            known.steps += 1
        elif params:
            again = known is not None and known.first.is_of(params[0])
            begun = 0 if known is None or not again else known.begun + 1
            if known is not None and begun:
                name = type(event.scaler).__name__
                self._tell(Restored(kind="rebuilt", class_name=name, calls=begun, steps=known.steps))
            if len(self._scaled) >= _MAX_SETS:
                self._scaled.clear()
            seen = internals.Seen(params[0])
            self._scaled[id(optimizer)] = _Trained("", weakref.ref(event.scaler), seen, begun=begun)

    def epoch_begins(self, event: EpochBegan) -> None:
        """Record the number of the first epoch of the process."""
        if not self._schedules.taken:
            epoch = attributes_of(sampler_of(event.loader)).get("epoch")
            self._epoch = max(self._epoch, epoch if type(epoch) is int else 0)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that is about to step."""
        for said, lacking in self._unfitted:
            self._tell(replace(said, names=tuple(lacking)[:_MAX_NAMES]))
        self._unfitted.clear()
        self._into.clear()
        if self._unread:
            self._still_unread(optimizer)
        if self._beside:
            self._follow_beside(optimizer)
        for name, begun, calls in self._schedules.renewed():
            self._tell(Restored(kind="rebuilt", class_name=name, calls=begun, steps=calls))
        number = self._schedules.taken_by(optimizer)
        if not number:
            self._begins(optimizer)
            return
        if (known := self._stepping) is not None and known.newest() is optimizer:
            known.steps = number + 1
            known.keeps_state = known.keeps_state or bool(internals.state(optimizer))
        if self._fresh is not None and self._fresh[0]() is optimizer:
            (_, schedule, calls, left), self._fresh = self._fresh, None
            has = {str(key) for held in internals.state(optimizer).values() for key in held}
            if has and (calls or left >= has):  # it is of those that have state, or that the checkpoint has state of
                kind = "optimizer" if calls else "left"
                self._tell(_about(optimizer, kind, schedule=schedule, calls=calls, others=len(left)))

    def _begins(self, optimizer: torch.optim.Optimizer) -> None:
        params = internals.params(optimizer)
        loaded, self._loaded = self._loaded, None
        empty = not internals.state(optimizer)
        self._begins_without(optimizer, params if empty else ())
        if loaded is not None and loaded.steps == self._schedules.taken:
            own = {id(p): p for p in params}
            same = [p for i, seen in loaded.params if (p := own.get(i)) is not None and seen.is_of(p)]
            now = _values(same) if len(same) == len(loaded.params) else None
            if now is not None and all([one != other for one, other in zip(loaded.values, now, strict=True)]):
                self._tell(_about(optimizer, "overwritten", location=loaded.location))
            if now is not None and empty and not loaded.steps and self._epoch >= _GOES_ON:
                self._fresh = weakref.ref(optimizer), None, self._epoch, set()
        for schedule, calls in self._schedules.of(optimizer):
            moved, name = vars(schedule).get("last_epoch"), type(schedule).__name__
            if not isinstance(moved, int) or moved - calls <= 1:
                continue
            if empty:
                self._fresh = weakref.ref(optimizer), name, moved, set()
            if (length := length_of(schedule)) is not None and moved >= length and _stands_still(optimizer):
                self._tell(_about(optimizer, "ended", schedule=name, calls=moved, steps=length))
        if steps := steps_of(optimizer):
            self._tell(_about(optimizer, "resumed", steps=steps))
        if params:
            self._follow(optimizer, params, empty=empty)

    def _begins_without(self, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> None:
        (of, kinds), self._left = self._left, ({}, set())
        if kinds and any([(seen := of.get(id(p))) is not None and seen.is_of(p) for p in params]):
            self._fresh = weakref.ref(optimizer), None, 0, kinds

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


def _bare(name: str) -> str:
    """Return a parameter's name without what DDP and `torch.compile` put before it."""
    return name.removeprefix("module.").removeprefix("_orig_mod.").removeprefix("module.")


def _tail(name: str, known: Collection[str]) -> str:
    """Return a name without what stands before one that is known."""
    while name not in known and "." in name:
        name = name.partition(".")[2]
    return name


def _renamed(missing: Sequence[str], unexpected: Collection[str]) -> list[str]:
    """Return the names that would fit but for what stands before them, on the one side or the other."""
    if not missing:
        return []
    shorter = {short for name in unexpected for short in _shorter(name)}
    return [name for name in missing if name in shorter or not {*_shorter(name)}.isdisjoint(unexpected)]


def _shorter(name: str) -> list[str]:
    """Return a name without its first part, and without words in front of a module's: `lm_head` and `head`."""
    parts = name.split(".")
    words = [part.split("_") for part in parts]
    return [name.partition(".")[2]] + [
        ".".join([*parts[:i], "_".join(own[k:]), *parts[i + 1 :]])
        for i, own in enumerate(words[:-1])
        for k in range(1, len(own))
    ]


def _some(params: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return params[:: max(1, len(params) // _SAMPLE)][:_SAMPLE]


def _stands_still(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the rates of an optimizer are next to nothing of what they were set to at first."""
    rates = [(group.get("lr"), group.get("initial_lr")) for group in internals.groups(optimizer)]
    known = [(lr, first) for lr, first in rates if isinstance(lr, float | int) and isinstance(first, float | int)]
    return bool(known) and all([lr <= ENDED * first for lr, first in known])


def _values(params: Sequence[torch.Tensor]) -> list[int] | None:
    """Return what changes with the values; None where that is not known without waiting for a device."""
    looked = glances(params)
    return None if looked is None else [*looked()]
