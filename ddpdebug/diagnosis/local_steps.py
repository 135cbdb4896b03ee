"""Local SGD, distinguished from replicas that diverge by mistake: these train apart and are averaged again and again.

So is what each rank trains for a while beside a model that has a DDP, and drops, or with which the run ends: a probe of
its features, a trial, a calibration. Steps that take turns with those of the DDP are none of that. Who averages the
parameters is not looked at, a library or a loop by hand: what counts is that replicas which had parted agree again.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ddpdebug.detectors.sync.local_steps import LOCAL_STEPS
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step

_DECLARED = Flag.LOCAL_ONLY | Flag.IN_JOIN | Flag.SHARDED_STATE
_PARAMETERS = frozenset({"params_before_digest", "params_after_digest"})
_PARTED = _PARAMETERS | {"grads_digest"}


#: Averages that show that replicas which were apart for longer than the patience are averaged: one may be a checkpoint
#: that is loaded, or a wrapper that is made.
_AVERAGES = 2


class _Kind(Enum):
    TOGETHER = "the replicas have not parted"
    UNDECIDED = "they have, and may be averaged yet"
    LOCAL = "they were averaged"
    PARTED = "they were not"


@dataclass(slots=True)
class _Replicas:
    alike: bool  # models without DDP have begun with the same parameters
    kind: _Kind = _Kind.TOGETHER
    apart: int = 0  # checked steps without synchronisation, from the first that differed
    differed: bool = False  # the parameters themselves, not only the gradients, since they agreed
    averages: int = 0  # how often they agreed again after they had parted for longer than the patience
    began: int = 0  # steps with a DDP, or sharded ones, before the first, if these have none
    newest: int = 0  # likewise, before the newest
    span: range = range(0)  # the numbers of its own, in a run that does not check each


class LocalSteps:
    """The kind of each optimizer's replicas (local SGD or diverged), by its steps so far.

    Args:
        config: settings that rules read.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._patience = int(LOCAL_STEPS.within(config))
        self._replicas: dict[int, _Replicas] = {}
        self._dropped = set[int]()  # optimizers that have gone with their parameters
        self._reduced = 0  # steps so far whose gradients a DDP or FSDP2 reduces

    def read(self, step: Step) -> bool:
        """Take the next step into account; return whether it shows that what was taken for a mistake is local SGD."""
        known = self._replicas.get(step.optimizer)
        before = None if known is None else known.kind
        reduced = step.any(Flag.SHARDED) or not step.all(Flag.NO_DDP)
        if not step.any(Flag.LAST_STATE):  # what is left at the end comes in no order
            self._reduced += reduced
        averaged = step.any(Flag.LOCAL_ONLY) and step.all(Flag.NO_DDP)  # with a DDP it may come of a Join
        if known is not None and before in {_Kind.UNDECIDED, _Kind.PARTED} and averaged:
            known.kind = _Kind.LOCAL
        if len(step.rows) > 1 and not step.any(_DECLARED):
            if known is None:
                alike = step.agrees("params_before_digest")
                began = 0 if reduced else self._reduced
                known = self._replicas[step.optimizer] = _Replicas(alike=alike, began=began)
            elif known.newest != self._reduced:
                known.began = 0  # they take turns
            known.newest = self._reduced
            known.span = range(known.span.start if known.span else step.step, step.step + 1)
            self._look(step, known)
            if step.optimizer in self._dropped:  # their last steps may come after the news
                self.drop(step.optimizer)
        return before is _Kind.PARTED and known is not None and known.kind is _Kind.LOCAL

    def _look(self, step: Step, known: _Replicas) -> None:
        if known.kind is _Kind.PARTED:
            if known.differed and step.agrees("params_before_digest"):
                known.averages, known.differed = known.averages + 1, False
                known.kind = _Kind.LOCAL if known.averages >= _AVERAGES else known.kind
            known.differed |= not step.differing.isdisjoint(_PARAMETERS)
            return
        if known.kind is _Kind.LOCAL:
            return
        if known.differed and step.agrees("params_before_digest"):
            known.kind = _Kind.LOCAL
        elif _is_apart(step, known):
            shared = _shared(step)
            if known.kind is _Kind.UNDECIDED or any(map(_differ, shared)) or not step.differing.isdisjoint(_PARTED):
                known.differed |= not step.differing.isdisjoint(_PARAMETERS)
                known.apart += bool(shared) or step.known("params_before_digest")
                known.kind = _Kind.UNDECIDED if known.apart <= self._patience else _Kind.PARTED
        elif known.kind is _Kind.UNDECIDED:
            known.kind = _Kind.PARTED  # they synchronise again, and were not averaged before

    def drop(self, optimizer: int) -> bool:
        """Take into account that an optimizer has gone with its parameters; return whether it was a mistake so far."""
        self._dropped.add(optimizer)
        known = self._replicas.get(optimizer)
        before = None if known is None else known.kind
        if known is not None and before in {_Kind.UNDECIDED, _Kind.PARTED}:
            known.kind = _Kind.LOCAL
        return before is _Kind.PARTED

    def is_beside(self, optimizer: int) -> bool:
        """Whether all steps of an optimizer, a few, came one after the other, behind some of a model that has a DDP."""
        known = self._replicas.get(optimizer)
        few = known is not None and known.began > 0 and len(known.span) <= self._patience
        return optimizer in self._dropped or few

    def undecided(self, step: Step) -> bool:
        """Whether later steps must show why the replicas diverge in this one."""
        return self._is(step, _Kind.UNDECIDED)

    def parted(self, optimizer: int) -> bool:
        """Whether later steps have shown that the replicas of an optimizer diverged by mistake."""
        known = self._replicas.get(optimizer)
        return known is not None and known.kind is _Kind.PARTED

    def marked(self, step: Step) -> Step:
        """Return the step, with the flags of local SGD if it belongs to it, or is beside the training so far."""
        beside = self.is_beside(step.optimizer) and self.undecided(step)
        return mark(step) if beside or self._is(step, _Kind.LOCAL) else step

    def _is(self, step: Step, kind: _Kind) -> bool:
        known = self._replicas.get(step.optimizer)
        return known is not None and known.kind is kind and _is_apart(step, known) and not step.any(_DECLARED)


def mark(step: Step) -> Step:
    """Return the step as one of local SGD."""
    return _with_flags(step, lambda flags: flags | _MARKS)


def unmarked(step: Step) -> Step:
    """Return a saved step as the ranks sent it, without these flags."""
    return _with_flags(step, lambda flags: flags & ~_MARKS) if step.any(Flag.AVERAGED) else step


_MARKS = int(Flag.LOCAL_ONLY | Flag.AVERAGED)


def _with_flags(step: Step, change: Callable[[int], int]) -> Step:
    rows = {rank: row._replace(flags=change(int(row.flags))) for rank, row in step.rows.items()}
    told = step.told and replace(step.told, some=change(step.told.some), common=change(step.told.common))
    return replace(step, rows=rows, told=told)


def _is_apart(step: Step, replicas: _Replicas) -> bool:
    if step.all(Flag.SHARDED):  # each part of a model has a replica in another island, and none agrees with its own
        own = all(_differ(shown) and len(shown) < len(step.rows) for shown in _shared(step))
        return own and "hyper_digest" not in step.differing
    if step.all(Flag.NO_DDP):  # who sat the first rounds out begins with other parameters, and averages no gradients
        return replicas.alike or (not step.agrees("foreign_grads_digest") and step.agrees("hyper_digest"))
    return step.all(Flag.UNSYNCED_BACKWARD)


def _shared(step: Step) -> list[Mapping[int, int]]:
    """Return what replicas of sharded parameters show of their gradients, by rank."""
    return [shown for shown in step.replicas("grads").values() if len(shown) > 1]


def _differ(shown: Mapping[int, int]) -> bool:
    return len({*shown.values()}) > 1
