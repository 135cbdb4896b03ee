"""Calls of learning-rate schedulers against optimizer steps, and learning rates that are set in vain."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import attributes_of, is_a
from ddpdebug.isolation.user_code import calling_frame, is_user_file, user_location
from ddpdebug.probes.entries import Entries
from ddpdebug.schema.announcements import UnusedSchedule
from ddpdebug.schema.details import ScheduledElsewhere, ScheduledOften
from ddpdebug.torch_internals.graph import milestones_of, parts_of

#: Whether a schedule drives an optimizer that steps is known after so many calls, beside as many steps of another one.
_IN_VAIN = 5
#: A measure on which a rate depends has moved the wrong way since its first value: so many times, and the rate was cut.
_MEASURES, _CUTS = 4, 2
#: Groups of an optimizer whose rates are compared.
_GROUPS = 64
#: A schedule's pace is judged after twice its length, and after so many steps of its optimizer.
_LEAST = 32
#: After so many steps it is known that a schedule is called with each of them.
_PER_STEP = 8
#: Share of the rate at which a schedule by factors has come to its end, and above which it hardly moves.
ENDED, _MOVED = 1e-3, 0.3
#: Logarithm of what the script makes of a rate that a schedule has set; a share that is itself the rate, and how near.
_WRITTEN, _FACTOR, _SAME = math.log(1.5), 0.05, 0.01
#: Classes whose `step` is not the one that they inherit.
STEPS: tuple[type, ...] = tuple([
    kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and "step" in vars(kind)
    and (issubclass(kind, lr_scheduler.LRScheduler))
])  # fmt: skip


@dataclass(slots=True)
class Calls:
    """The calls of one scheduler by the user's code."""

    scheduler: Callable[[], Any]
    total: int = 0
    pending: int = 0  # since the last step of any optimizer
    location: str | None = None
    inner: int = 0  # calls by torch itself
    optimizer: int = 0  # its id
    part: bool = False  # of another schedule
    length: int | None = None  # calls until its rate is at its lowest
    left: float = 0.0  # of the rate then, as a share
    since: int = 0  # steps of its optimizer before it was made
    told: bool = False
    rates: tuple[Any, Any] = (None, None)  # shares of the rate as it was called last, and before
    resumed: tuple[int, int] = (0, 0)  # steps of its optimizer behind it, and its own, as both begin here
    given: int = 0  # calls with a measure
    measures: tuple[float, ...] = ()  # the first two, the larger the worse
    least: float = math.inf  # of those after the first
    cuts: int = 0  # of the rate between these
    begun: int = 0  # schedules of its class and optimizer before it that another one has cut short
    written: tuple[float, float] | None = None  # the rate that it had set, and one that the script wrote over it
    vain: str | None = None  # how a rate that the script chose does not reach the optimizer
    highest: float = 0.0  # share of the rate


@dataclass(slots=True)
class Steps:
    """The steps of one optimizer."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    number: int = 0
    newest: int = 0  # among those of all optimizers
    rate: Any = None  # of the first group, at the first step
    constant: bool = True
    rates: Sequence[Any] = ()  # of its groups, at the newest watched step
    moves: Sequence[int] = ()  # how often each of them was another one than before


class Schedules:
    """All schedulers of the process."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._calls: dict[int, Calls] = {}
        self._steps: dict[int, Steps] = {}
        self._attributes: dict[int, Any] = {}
        self.taken = 0  # steps of all optimizers
        self._ended: list[tuple[UnusedSchedule, int]] = []  # those that are gone; the newest step of their optimizers
        self._paces: list[UnusedSchedule] = []
        self._newest: dict[tuple[int, str], Calls] = {}  # by optimizer and class
        self._renewed: list[tuple[str, int, int]] = []

    def called(self, scheduler: Any) -> None:
        """Record a call; those that torch makes itself, in a constructor or for a part, do not count."""
        calls, caller = self._of(scheduler), calling_frame()
        if caller is not None and internals.NOTED in caller.f_code.co_varnames:
            caller = caller.f_back  # it is the method itself, in whose code the look lies
        if caller is None or not is_user_file(caller.f_code.co_filename):
            calls.inner += 1
            return
        if not calls.total:
            calls.length = length_of(scheduler) if is_at_its_start(scheduler) else None  # a part of a longer run
            calls.left = 0.0 if calls.length is None else left_by(scheduler)
            calls.since *= bool(calls.inner)  # one whose constructor does not step it was not seen before
            calls.written = written_over(scheduler)
        calls.total += 1
        calls.pending += 1
        if calls.length is None:
            calls.rates = share_of(scheduler), calls.rates[0]
        if calls.pending != 1 or calls.location is None:
            calls.location = user_location(caller)

    def moved(self, scheduler: Any, measure: float | None = None) -> None:
        """Record a call with an argument (an epoch or a metric), whose frequency means nothing."""
        calls = self._of(scheduler)
        calls.inner += 2
        if measure is None or not is_a(scheduler, lr_scheduler.ReduceLROnPlateau) or calls.told:
            return
        own = attributes_of(scheduler)
        rate = (internals.groups(own["optimizer"])[0] if "optimizer" in own else {}).get("lr")
        worse = -1.0 if own.get("mode") == "max" else 1.0
        now, calls.given = worse * measure, calls.given + 1
        if calls.given <= 2:
            calls.measures = (*calls.measures, now)
        if calls.given > 1:
            calls.least = min(calls.least, now)
        calls.cuts += type(rate) is float and type(calls.rates[0]) is float and rate < calls.rates[0]
        calls.rates = rate, calls.rates[0]
        if (
            calls.cuts >= _CUTS
            and calls.given > _MEASURES
            and calls.least > calls.measures[0]
            and now > calls.measures[1]
        ):
            calls.told = True
            told = UnusedSchedule(
                class_name=type(scheduler).__name__,
                calls=calls.given,
                steps=self.taken,
                cuts=calls.cuts,
                measures=(calls.measures[0] * worse, measure),
                location=user_location(),
            )
            self._paces.append(told)

    def before_step(self, optimizer: torch.optim.Optimizer, micro_batches: int) -> dict[str, Any]:
        """Return the entries `scheduler` and `elsewhere` of the step's detail, if there are any."""
        number = self._count(optimizer)
        found: dict[str, Any] = {}
        steps = 0 if number else steps_of(optimizer)  # before its first step here: of a run that is gone on with
        for calls in self._living():
            scheduler = calls.scheduler()
            if steps and calls.optimizer == id(optimizer) and not calls.part and is_at_its_start(scheduler):
                self._paces.append(UnusedSchedule(class_name=type(scheduler).__name__, steps=steps, begins_again=True))
            if steps and calls.optimizer == id(optimizer) and isinstance(at := vars(scheduler).get("last_epoch"), int):
                calls.resumed = steps, at
            self._falls_behind(type(scheduler).__name__, calls, number)
            if attributes_of(scheduler).get("optimizer") is optimizer and calls.pending > 1:
                found["scheduler"] = ScheduledOften(
                    class_name=type(scheduler).__name__,
                    calls=calls.pending,
                    micro_batches=micro_batches,
                    location=calls.location,
                )
            elif number >= _IN_VAIN and calls.total >= _IN_VAIN and self._in_vain(scheduler, optimizer):
                name = type(scheduler).__name__
                found["elsewhere"] = ScheduledElsewhere(kind="scheduler", class_name=name, location=calls.location)
            elif calls.total and calls.optimizer == id(optimizer) and (vain := _vain(scheduler, calls)) is not None:
                name = type(scheduler).__name__
                found["elsewhere"] = ScheduledElsewhere(kind=vain, class_name=name, location=calls.location)
            calls.pending = 0
            if calls.length is not None and not calls.told and calls.optimizer == id(optimizer):
                self._pace(type(scheduler).__name__, calls, number - calls.since)
        if self._leaves_groups_out(optimizer):
            found["elsewhere"] = ScheduledElsewhere(kind="group", class_name=type(optimizer).__name__)
        if self._attribute(optimizer):
            found["elsewhere"] = ScheduledElsewhere(kind="attribute", class_name=type(optimizer).__name__)
        return found

    def _leaves_groups_out(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the script sets the rate of the first group again and again, and others keep the usual one.

        With a scheduler that is a choice; and so is a rate of a group's own, or a group that the script has marked.
        """
        known, groups = self._steps[id(optimizer)], internals.groups(optimizer)[:_GROUPS]
        rates = [group.get("lr") for group in groups]
        if len(rates) < 2 or any([type(rate) is not float for rate in rates]):
            return False
        if len(known.rates) != len(rates):
            known.rates, known.moves = rates, [0] * len(rates)
        known.moves = [n + (a != b) for n, a, b in zip(known.moves, known.rates, rates, strict=True)]
        known.rates = rates
        defaults = internals.own_attribute(optimizer, "defaults", {})
        usual = defaults.get("lr")
        marks = [_marks(group, defaults) for group in groups]
        kept = [rate for n, rate, mark in zip(known.moves, rates, marks, strict=True) if not n and mark == marks[0]]
        return known.moves[0] >= _IN_VAIN and kept != [] and {*kept} == {usual} and not self.of(optimizer)

    def _falls_behind(self, name: str, calls: Calls, number: int) -> None:
        """Note a schedule that goes on with each step, from a place far behind its optimizer: that of an epoch."""
        steps, at = calls.resumed
        if number < _PER_STEP or not steps:
            return
        calls.resumed = (0, 0)
        if 0 < at < steps / 2 and calls.total >= number - 1 and not calls.part:
            self._paces.append(UnusedSchedule(class_name=name, steps=steps, calls=at, begins_again=True))

    def of(self, optimizer: torch.optim.Optimizer) -> list[tuple[Any, int]]:
        """Return the schedulers of an optimizer, with the number of calls of each, by any caller."""
        calls = [known for known in self._living() if known.optimizer == id(optimizer) and not known.part]
        return [(known.scheduler(), known.total + known.inner) for known in calls]

    def taken_by(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of steps that an optimizer has taken in this process."""
        known = self._steps.get(id(optimizer))
        return 0 if known is None or known.optimizer() is not optimizer else known.number

    def passed(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that is not watched."""
        self._count(optimizer)
        for calls in self._calls.values():
            calls.pending = 0

    def forgive(self) -> None:
        """Discard the calls since the last step, because the loss scaler has skipped a step."""
        for calls in self._living():
            calls.pending = 0

    def built(self, scheduler: Any) -> None:
        """Record a scheduler whose constructor does not call its `step`."""
        self._of(scheduler)

    def paces(self) -> list[UnusedSchedule]:
        """Return the schedulers, each once, that were stepped for at least twice their lengths."""
        found, self._paces = self._paces, []
        return found

    def renewed(self) -> list[tuple[str, int, int]]:
        """Return (class, how many in a row, calls of the former one) of schedulers that replaced another too early."""
        found, self._renewed = self._renewed, []
        return found

    def _renews(self, name: str, calls: Calls) -> None:
        """Note a schedule that takes the place of one of its class which has not come to its end."""
        before = self._newest.get((calls.optimizer, name))
        self._newest[calls.optimizer, name] = calls
        if before is None or not before.total or before.part or calls.since <= before.since:
            return
        last, one_before = before.rates
        moves = last is not None and one_before is not None and last != one_before and last > _MOVED
        if moves if before.length is None else before.total < before.length:
            calls.begun = before.begun + 1
            self._renewed.append((name, calls.begun, before.total))

    def _pace(self, name: str, calls: Calls, steps: int) -> None:
        assert calls.length is not None
        if steps >= max(_LEAST, 2 * calls.length) and calls.total >= calls.length:
            calls.told = True
            if not calls.inner > 1:
                self._paces.append(_used(name, calls, steps))

    def at_end(self, world: int | None = None) -> list[UnusedSchedule]:
        """Return the schedulers that were never stepped, and those of a known length, with their optimizers' steps.

        One that ended with the function that made it is among them. Where the rate has changed by other means, by hand
        or by another schedule, those that were never stepped are left out: a second schedule may be meant for a phase
        that was not reached.
        """
        for calls in self._living():
            self._note_end(type(calls.scheduler()).__name__, calls)
        found, self._ended = self._ended, []
        last = self.taken - len(self._steps)
        return [replace(fact, world=world if newest > last else None) for fact, newest in found]

    def _note_end(self, name: str, calls: Calls) -> None:
        steps = self._steps.get(calls.optimizer)
        if steps is None or calls.inner > 1 or calls.part:
            return
        if calls.total and calls.length is not None and not calls.told:
            self._ended.append((_used(name, calls, steps.number - calls.since), steps.newest))
        elif not calls.total and steps.constant:
            self._ended.append((UnusedSchedule(class_name=name, steps=steps.number), steps.newest))

    def _count(self, optimizer: torch.optim.Optimizer) -> int:
        """Count a step; return how many there were before."""
        known = self._steps.get(id(optimizer))
        groups = internals.groups(optimizer)
        rate = groups[0].get("lr") if groups else None
        if known is None or known.optimizer() is not optimizer:
            known = self._steps[id(optimizer)] = Steps(weakref.ref(optimizer), rate=rate)
        self.taken += 1
        known.number, known.newest = known.number + 1, self.taken
        # a tensor's value is not waited for
        known.constant = known.constant and not isinstance(rate, torch.Tensor) and rate == known.rate
        return known.number - 1

    def _of(self, scheduler: Any) -> Calls:
        known = self._calls.get(id(scheduler))
        if known is None or known.scheduler() is not scheduler:
            key, name, calls = id(scheduler), type(scheduler).__name__, Calls(lambda: None)

            known = self._calls[key] = calls
            gone = partial(self._note_end, name, calls)
            calls.scheduler = self._entries.when_gone("probe:schedules", scheduler, gone)
            optimizer = attributes_of(scheduler).get("optimizer")
            calls.optimizer, steps = id(optimizer), self._steps.get(id(optimizer))
            calls.since = steps.number if steps is not None and steps.optimizer() is optimizer else 0
            for part in parts_of(scheduler):
                self._of(part).part = True
            self._renews(name, calls)
        return known

    def _living(self) -> list[Calls]:
        gone = [key for key, calls in self._calls.items() if calls.scheduler() is None]
        for key in gone:
            del self._calls[key]
        return list(self._calls.values())

    def _in_vain(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether no optimizer that steps has the groups whose rates the scheduler sets.

        One that has stepped no more since another one steps what it has is one of the past.
        """
        own = attributes_of(scheduler).get("optimizer")
        if own is None:
            return False
        groups = _lists(own)
        for steps in self._steps.values():
            stepping = steps.optimizer()
            if stepping is own and self.taken - steps.newest > _IN_VAIN and not groups & _lists(optimizer):
                held = {id(p) for p in internals.params(own)}
                return held.issubset([id(p) for p in internals.params(optimizer)])
            if stepping is own or (stepping is not None and groups & _lists(stepping)):
                return False
        return True

    def _attribute(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `optimizer.lr = x` keeps changing, which torch's own optimizers do not read."""
        if not type(optimizer).__module__.startswith("torch.optim") or "lr" not in vars(optimizer):
            return False
        value = vars(optimizer)["lr"]
        before = self._attributes.setdefault(id(optimizer), value)
        return bool(before != value)


def _marks(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a script has noted in a group, beside the optimizer's own settings: `fix_lr`, `lr_scale`, a name."""
    own = {key: value for key, value in group.items() if key not in defaults and key not in {"params", "initial_lr"}}
    return {key: value for key, value in own.items() if type(value) in {str, int, float, bool}}


def _vain(scheduler: Any, calls: Calls) -> str | None:
    """Return how a schedule makes something else of the rate than the script chose; None if it does not.

    `overwritten`: the script wrote a rate after the schedule was made, whose first step set its own again.
    `factor`: the function of a `LambdaLR` has returned the rate, which is taken times the rate.
    """
    if calls.written is not None:
        (before, wanted), calls.written = calls.written, None
        now = rate_of(scheduler)
        lost = now is not None and now > 0 and abs(math.log(now / before)) < _MOVED * abs(math.log(wanted / before))
        calls.vain = "overwritten" if lost else None
    elif calls.vain == "overwritten" and written_over(scheduler) is not None:
        calls.vain = None  # the script writes it again
    if type(scheduler) is lr_scheduler.LambdaLR and (share := share_of(scheduler)) is not None:
        rises, calls.highest = share > calls.highest, max(calls.highest, share)
        base, below = vars(scheduler)["base_lrs"][0], calls.highest < _FACTOR
        calls.vain = "factor" if below and not rises and abs(calls.highest / base - 1) < _SAME else calls.vain
    return calls.vain


def written_over(scheduler: Any) -> tuple[float, float] | None:
    """Return the rate that one of torch's schedulers has set, and the one that was written since; None if none was."""
    if type(scheduler).__module__ != lr_scheduler.__name__:
        return None
    before, now = scheduler.get_last_lr()[:1], rate_of(scheduler)
    if now is None or not now > 0 or not before or type(before[0]) is not float or not before[0] > 0:
        return None
    return (before[0], now) if abs(math.log(now / before[0])) > _WRITTEN else None


def rate_of(scheduler: Any) -> float | None:
    """Return the present learning rate of a scheduler's first group; None unless it is a number."""
    optimizer = vars(scheduler).get("optimizer")
    groups = [] if optimizer is None else internals.groups(optimizer)
    now = groups[0].get("lr") if groups else None
    return float(now) if isinstance(now, float | int) else None


def _used(name: str, calls: Calls, steps: int) -> UnusedSchedule:
    return UnusedSchedule(
        class_name=name,
        steps=steps,
        calls=calls.total,
        length=calls.length,
        left=calls.left,
        location=calls.location,
    )


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of steps in an optimizer's state; 0 if it cannot be read without waiting."""
    for held in internals.state(optimizer).values():
        step = held.get("step")
        if isinstance(step, torch.Tensor) and step.device.type == "cpu" and step.numel() == 1:
            return int(step)
        if isinstance(step, int | float):
            return int(step)
    return 0


def is_at_its_start(scheduler: Any) -> bool:
    """Return whether one of torch's schedulers has not moved since it was made."""
    return bool(vars(scheduler).get("last_epoch") == 0)


def share_of(scheduler: Any) -> float | None:
    """Return the present learning rate as a share of the scheduler's initial one; None unless both are numbers."""
    first, now = (vars(scheduler).get("base_lrs") or (None,))[0], rate_of(scheduler)
    if now is None or not isinstance(first, float | int):
        return None
    return now / first if first else None


def length_of(scheduler: Any) -> int | None:
    """Return the number of calls after which one of torch's schedulers is at its lowest rate, or close to 0.

    None of one that only warms up, that begins again by design, or whose form is not known.
    """
    if type(scheduler) is lr_scheduler.SequentialLR:
        parts, milestones = parts_of(scheduler), milestones_of(scheduler)
        last = length_of(parts[-1]) if parts else None
        return milestones[-1] + last if milestones and last is not None else None
    own = _LENGTHS.get(type(scheduler))
    length = None if own is None else own(vars(scheduler))
    return int(length) if isinstance(length, int | float) and length > 0 else None


def left_by(scheduler: Any) -> float:
    """Return the share of the initial rate at which one of torch's schedulers of a known length ends."""
    about = vars(scheduler)
    if type(scheduler) is lr_scheduler.SequentialLR:
        return left_by(parts_of(scheduler)[-1])
    if type(scheduler) is lr_scheduler.CosineAnnealingLR:
        return max((float(about["eta_min"] / rate) for rate in about["base_lrs"] if rate), default=0.0)
    if type(scheduler) is lr_scheduler.LinearLR:
        return float(about["end_factor"] / about["start_factor"])
    if type(scheduler) is lr_scheduler.MultiStepLR:
        return float(about["gamma"] ** sum(about["milestones"].values()))
    return 0.0


def _of_cosine(about: dict[str, Any]) -> Any:
    return about["T_max"] if all([about["eta_min"] < _MOVED * rate for rate in about["base_lrs"]]) else None


def _of_line(about: dict[str, Any]) -> Any:
    return about["total_iters"] if about["end_factor"] < _MOVED * about["start_factor"] else None


def _of_factor(about: dict[str, Any]) -> Any:
    gamma = about["gamma"]
    return math.ceil(math.log(ENDED) / math.log(gamma)) * about.get("step_size", 1) if 0 < gamma < 1 else None


def _of_milestones(about: dict[str, Any]) -> Any:
    drops = about["milestones"]
    return max(drops, default=None) if about["gamma"] ** sum(drops.values()) < _MOVED else None


def _of_factors(about: dict[str, Any]) -> Any:
    """Return the total that a library's function was given for a schedule made of factors (`functools.partial`)."""
    made = about["lr_lambdas"][0] if about["lr_lambdas"] else None
    return made.keywords.get("num_training_steps") if type(made) is partial else None


_LENGTHS: dict[type, Callable[[dict[str, Any]], Any]] = {
    lr_scheduler.CosineAnnealingLR: _of_cosine,
    lr_scheduler.OneCycleLR: lambda about: about["total_steps"],
    lr_scheduler.LambdaLR: _of_factors,
    lr_scheduler.PolynomialLR: lambda about: about["total_iters"],
    lr_scheduler.LinearLR: _of_line,
    lr_scheduler.StepLR: _of_factor,
    lr_scheduler.ExponentialLR: _of_factor,
    lr_scheduler.MultiStepLR: _of_milestones,
}


def _lists(optimizer: object) -> set[int]:
    """Return what tells an optimizer's groups from others': the lists of their parameters."""
    return {id(group["params"]) for group in internals.groups(optimizer)}
