"""The search for the object that holds growing memory: its time, and its rank (the lowest whose memory grows)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ddpdebug import torch_internals as internals
from ddpdebug.forensics.memory.holders import search
from ddpdebug.probes.handover import Plans
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.threads import always_alone
from ddpdebug.probes.training_events import Bus, StepClosing
from ddpdebug.schema.details import Holders
from ddpdebug.schema.step import Step

#: However often memory is suspected, no more searches are made in a run.
MAX_SEARCHES = 3
#: Live graphs, or a share of the fastest growth, that make a rank one of those to be searched.
_GRAPHS = 6
_SHARE = 0.5


_KIND = "holders"


@dataclass(slots=True)
class _Search:
    """A planned search; `result` is set once, and `made` after it, by the training thread."""

    graphs: int  # that were alive when it was planned
    result: Holders | None = None
    made: bool = False


class HolderSearch:
    """The searches of one rank, one for each cause: requested in the background thread, run on the training thread.

    All state belongs to the background thread; `boundary` knows the plans only.
    """

    def __init__(
        self,
        bus: Bus,
        state: StepState,
        plans: Plans | None = None,
        alone: Callable[[], AbstractContextManager[bool]] = always_alone,
    ) -> None:
        self.rank = 0
        self.searches = 0
        self._state, self._plans, self._alone = state, plans or Plans(), alone
        self._first: dict[int, int] = {}
        self._now: dict[int, tuple[int, int]] = {}  # rank -> (live graphs, growth)
        self._search: _Search | None = None  # the newest
        self._over = False  # most of the graphs that were alive then are gone: a new suspicion has another cause
        self._result: Holders | None = None
        bus.on("forensics:holders", StepClosing, self.boundary)

    def learn(self, step: Step) -> None:
        """Record the memory growth of all ranks; called with the same steps on all ranks."""
        if step.optimizer != 0:
            return
        for rank, row in step.rows.items():
            used = row.device_allocated_bytes or row.host_private_bytes
            self._first.setdefault(rank, used)
            self._now[rank] = row.live_graphs, used - self._first[rank]
        if self._search is not None and self._search.made:
            self._over |= 2 * self._graphs() < self._search.graphs

    def known(self) -> bool:
        """Whether there is a result; if not and this rank is the one to search, plan the search."""
        if self.chosen() != self.rank:
            return True
        if self._search is not None and not self._search.made:
            return False
        if self._search is not None:
            self._result = self._search.result
            if self._result is not None and not self._over:  # the same cause
                return True
        if self.searches >= MAX_SEARCHES:
            return True
        self.searches += 1
        self._over = False
        self._search = _Search(self._graphs())
        self._plans.add(_KIND, 0, self._search)
        return False

    def found(self) -> Holders | None:
        """Return the newest result."""
        return self._result

    def _graphs(self) -> int:
        return self._now.get(self.rank, (0, 0))[0]

    def chosen(self) -> int:
        """Return the rank that searches."""
        graphs = max((count for count, _ in self._now.values()), default=0)
        growth = max((grown for _, grown in self._now.values()), default=0)
        if graphs >= _GRAPHS:
            return min(rank for rank, (count, _) in self._now.items() if count >= _SHARE * graphs)
        return min((rank for rank, (_, grown) in self._now.items() if grown >= _SHARE * growth), default=0)

    def boundary(self, _: StepClosing) -> None:
        """Run planned searches; on the training thread, at the end of a step."""
        for wanted in self._plans.take(_KIND):
            try:
                frame = sys._getframe(1)  # noqa: SLF001 - to walk the stack
                with self._alone() as alone:
                    known = known_tensors(self._state, gradients=alone)
                wanted.result = search(known, frame)
            finally:
                wanted.made = True


def known_tensors(state: StepState, *, gradients: bool) -> set[int]:
    """Return the ids of tensors that are meant to stay: parameters, gradients, buffers, optimizer state.

    Args:
        gradients: they may be read here.
    """
    known: set[int] = set()
    for wrapper in state.wrappers:
        module = wrapper.module()
        if module is not None:
            known.update(map(id, internals.parameters(module)))
            known.update(map(id, internals.buffers(module)))
    for watch in state.watches:
        known.update(map(id, watch.params))
        for optimizer in watch.optimizers():
            for held in list(internals.state(optimizer).values()):
                known.update(map(id, held.values()))
    for watch in state.watches if gradients else ():
        known.update(id(p.grad) for p in watch.params if p.grad is not None)
    return known
