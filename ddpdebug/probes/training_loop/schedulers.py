"""Counts the calls of learning-rate schedulers against the optimizer steps, and sees where the rate is set in vain."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler

from ddpdebug.isolation.user_code import calling_frame, is_user_file, user_location
from ddpdebug.probes.entries import Entries
from ddpdebug.schema.details import ScheduledElsewhere, ScheduledOften
from ddpdebug.torch_internals.graph import parts_of

#: Whether a schedule drives an optimizer that steps is known after so many calls, beside as many steps of another one.
_IN_VAIN = 5
#: Classes whose `step` is not the one that they inherit.
STEPS: tuple[type, ...] = tuple(
    kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and "step" in vars(kind)
    and (issubclass(kind, lr_scheduler.LRScheduler))
)  # fmt: skip


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


@dataclass(slots=True)
class Steps:
    """The steps of one optimizer."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    number: int = 0
    rate: Any = None  # of the first group, at the first step
    constant: bool = True


class Schedules:
    """All schedulers of the process."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._calls: dict[int, Calls] = {}
        self._steps: dict[int, Steps] = {}
        self._attributes: dict[int, Any] = {}
        self._unmoved: list[tuple[str, int]] = []  # class and optimizer steps of those that nothing has stepped

    def called(self, scheduler: Any) -> None:
        """Note a call; those that torch makes itself, in a constructor or for a part, do not count."""
        calls, caller = self._of(scheduler), calling_frame()
        if caller is None or not is_user_file(caller.f_code.co_filename):
            calls.inner += 1
            return
        calls.total += 1
        calls.pending += 1
        if calls.pending != 1 or calls.location is None:
            calls.location = user_location(caller)

    def moved(self, scheduler: Any) -> None:
        """Note a call with an argument, an epoch or a metric: how often it is made says nothing."""
        self._of(scheduler).inner += 2

    def before_step(self, optimizer: torch.optim.Optimizer, micro_batches: int) -> dict[str, Any]:
        """Return the entries `scheduler` and `elsewhere` of the step's details, as far as there is something."""
        number = self._count(optimizer)
        found: dict[str, Any] = {}
        for calls in self._living():
            scheduler = calls.scheduler()
            if getattr(scheduler, "optimizer", None) is optimizer and calls.pending > 1:
                found["scheduler"] = ScheduledOften(
                    class_name=type(scheduler).__name__,
                    calls=calls.pending,
                    micro_batches=micro_batches,
                    location=calls.location,
                )
            elif number >= _IN_VAIN and calls.total >= _IN_VAIN and self._in_vain(scheduler):
                name = type(scheduler).__name__
                found["elsewhere"] = ScheduledElsewhere(kind="scheduler", class_name=name, location=calls.location)
            calls.pending = 0
        if self._attribute(optimizer):
            found["elsewhere"] = ScheduledElsewhere(kind="attribute", class_name=type(optimizer).__name__)
        return found

    def forgive(self) -> None:
        """Forget the calls since the last step: the loss scaler has skipped one."""
        for calls in self._living():
            calls.pending = 0

    def built(self, scheduler: Any) -> None:
        """Note a schedule whose constructor does not step it."""
        self._of(scheduler)

    def never_called(self) -> list[tuple[str, int]]:
        """Name the schedulers that nothing has ever stepped, with the steps of their optimizers.

        One that ended with the function that made it is among them. Where the rate has changed by other means, by hand
        or by another schedule, there are none: a second schedule may be meant for a phase that was not reached.
        """
        for calls in self._living():
            self._note_unmoved(type(calls.scheduler()).__name__, calls)
        found, self._unmoved = self._unmoved, []
        return found

    def _note_unmoved(self, name: str, calls: Calls) -> None:
        steps = self._steps.get(calls.optimizer)
        if steps is not None and calls.total == 0 and calls.inner <= 1 and not calls.part and steps.constant:
            self._unmoved.append((name, steps.number))

    def _count(self, optimizer: torch.optim.Optimizer) -> int:
        """Count a step; return how many there were before."""
        known = self._steps.get(id(optimizer))
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        if known is None or known.optimizer() is not optimizer:
            known = self._steps[id(optimizer)] = Steps(weakref.ref(optimizer), rate=rate)
        known.number += 1
        # a tensor's value is not waited for
        known.constant = known.constant and not isinstance(rate, torch.Tensor) and rate == known.rate
        return known.number - 1

    def _of(self, scheduler: Any) -> Calls:
        known = self._calls.get(id(scheduler))
        if known is None or known.scheduler() is not scheduler:
            key, name, calls = id(scheduler), type(scheduler).__name__, Calls(lambda: None)

            known = self._calls[key] = calls
            gone = partial(self._note_unmoved, name, calls)
            calls.scheduler = self._entries.when_gone("probe:schedules", scheduler, gone)
            calls.optimizer = id(getattr(scheduler, "optimizer", None))
            for part in parts_of(scheduler):
                self._of(part).part = True
        return known

    def _living(self) -> list[Calls]:
        gone = [key for key, calls in self._calls.items() if calls.scheduler() is None]
        for key in gone:
            del self._calls[key]
        return list(self._calls.values())

    def _in_vain(self, scheduler: Any) -> bool:
        """Tell whether no optimizer that steps has the groups whose rates the scheduler sets."""
        own = getattr(scheduler, "optimizer", None)
        if own is None:
            return False
        groups = {id(group) for group in getattr(own, "param_groups", ())}
        for steps in self._steps.values():
            stepping = steps.optimizer()
            if stepping is own or (stepping is not None and groups & {id(group) for group in stepping.param_groups}):
                return False
        return True

    def _attribute(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether `optimizer.lr = x` keeps changing, which torch's own optimizers do not read."""
        if not type(optimizer).__module__.startswith("torch.optim") or "lr" not in vars(optimizer):
            return False
        value = vars(optimizer)["lr"]
        before = self._attributes.setdefault(id(optimizer), value)
        return bool(before != value)
