"""Counts the calls of learning-rate schedulers against the optimizer steps, and sees where the rate is set in vain."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler

from ddpdebug.probes.guard import is_user_file, user_location
from ddpdebug.torch_internals.graph import parts_of

#: A schedule that drives no stepping optimizer is in vain after so many calls, beside as many steps of another one.
_IN_VAIN = 5
#: Classes whose `step` is not the one that they inherit.
STEPS: tuple[type, ...] = tuple(
    kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and "step" in vars(kind)
    and (issubclass(kind, lr_scheduler.LRScheduler))
)  # fmt: skip


@dataclass(slots=True)
class Calls:
    """The calls of one scheduler by the user's code."""

    scheduler: weakref.ref[Any]
    total: int = 0
    pending: int = 0  # since the last step of any optimizer
    location: str | None = None
    inner: int = 0  # calls by torch itself


class Schedules:
    """All schedulers of the process."""

    def __init__(self) -> None:
        self._calls: dict[int, Calls] = {}
        self._steps: dict[int, tuple[weakref.ref[torch.optim.Optimizer], int]] = {}
        self._attributes: dict[int, Any] = {}

    def called(self, scheduler: Any, depth: int = 3) -> None:
        """Note a call; those that torch makes itself, in a constructor or for a part, do not count."""
        calls = self._of(scheduler)
        if not is_user_file(sys._getframe(depth).f_code.co_filename):  # noqa: SLF001 - as in guard.py
            calls.inner += 1
            return
        calls.total += 1
        calls.pending += 1
        if calls.pending != 1 or calls.location is None:
            calls.location = user_location(sys._getframe(depth))  # noqa: SLF001 - as above

    def moved(self, scheduler: Any) -> None:
        """Note a call with an argument, an epoch or a metric: how often it is made says nothing."""
        self._of(scheduler).inner += 2

    def before_step(self, optimizer: torch.optim.Optimizer, micro_batches: int) -> dict[str, Any]:
        """Return the entries `scheduler` and `elsewhere` of the step's details, as far as there is something."""
        ref, number = self._steps.get(id(optimizer), (None, 0))
        known = ref is not None and ref() is optimizer
        self._steps[id(optimizer)] = (ref, number + 1) if known and ref else (weakref.ref(optimizer), 1)
        found: dict[str, Any] = {}
        for calls in self._living():
            scheduler = calls.scheduler()
            if getattr(scheduler, "optimizer", None) is optimizer and calls.pending > 1:
                found["scheduler"] = {
                    "class": type(scheduler).__name__,
                    "calls": calls.pending,
                    "micro_batches": micro_batches,
                    "location": calls.location,
                }
            elif number >= _IN_VAIN and calls.total >= _IN_VAIN and self._in_vain(scheduler):
                about = {"class": type(scheduler).__name__, "location": calls.location}
                found["elsewhere"] = {"kind": "scheduler", **about}
            calls.pending = 0
        if self._attribute(optimizer):
            found["elsewhere"] = {"kind": "attribute", "class": type(optimizer).__name__, "location": None}
        return found

    def forgive(self) -> None:
        """Forget the calls since the last step: the loss scaler has skipped one."""
        for calls in self._living():
            calls.pending = 0

    def never_called(self, least: int) -> list[str]:
        """Name the schedulers that nothing has ever stepped although their optimizer took so many steps."""
        living = self._living()
        parts = {id(part) for calls in living for part in parts_of(calls.scheduler())}
        found = []
        for calls in living:
            scheduler = calls.scheduler()
            steps = self._steps.get(id(getattr(scheduler, "optimizer", None)), (None, 0))[1]
            if calls.total == 0 and calls.inner <= 1 and id(scheduler) not in parts and steps >= least:
                found.append(type(scheduler).__name__)
        return found

    def _of(self, scheduler: Any) -> Calls:
        known = self._calls.get(id(scheduler))
        if known is None or known.scheduler() is not scheduler:
            known = self._calls[id(scheduler)] = Calls(weakref.ref(scheduler))
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
        for ref, _ in self._steps.values():
            stepping = ref()
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
