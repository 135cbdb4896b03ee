"""Assembly of the ranks' rows into steps, in the same order on every rank. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.step import Step

#: A step that some rank does not deliver is judged without it once the others are this many steps ahead ...
LAG_STEPS = 16
#: ... of a rank that has passed the step; one that has not come so far yet may be late, for nothing ties the ranks
#: together when gradients are not synchronised. Details of a step must not have left the ring by then.
LATE_STEPS = 192
_MAX_OPTIMIZERS = 1 << 16  # one for each parameter, where they step inside backward
_FLAGS = sum(Flag)


def fault_of(row: Row, rank: int, progress: int) -> str | None:
    """Return why a row from `rank` is impossible; None if it is plausible.

    Args:
        progress: steps that the fastest rank has taken.
    """
    if row.rank != rank:
        return f"it says that it is of rank {row.rank}"
    if not 0 <= row.step <= progress:
        return f"it is of step {row.step}, and no rank has taken more than {progress}"
    if not 0 <= row.optimizer < _MAX_OPTIMIZERS:
        return f"it is of optimizer {row.optimizer}"
    if row.flags & ~_FLAGS:
        return f"its flags {row.flags:#x} are unknown"
    return None


class Assembler:
    """Collects rows until every member has delivered its row for the same step of the same optimizer."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._members = frozenset(range(world))
        self._open: dict[tuple[int, int], dict[int, Row]] = {}
        self._newest: dict[int, int] = {}
        self._reached: dict[int, int] = {}  # rank -> its newest step of any optimizer
        self._closed: dict[int, int] = {}  # optimizer -> newest step handed out

    @property
    def waiting(self) -> int:
        """The number of incomplete steps."""
        return len(self._open)

    def add(self, rank: int, row: Row) -> None:
        """Add a row; one that arrives after its step was judged is dropped."""
        self._reached[rank] = max(self._reached.get(rank, -1), row.step)
        if row.step <= self._closed.get(row.optimizer, -1):
            return
        self._open.setdefault((row.optimizer, row.step), {})[rank] = row
        self._newest[row.optimizer] = max(self._newest.get(row.optimizer, 0), row.step)

    def set_members(self, members: tuple[int, ...]) -> None:
        """Set the members, so that no step waits for ranks that left."""
        self._members = frozenset(members)

    def ready(self) -> Iterator[Step]:
        """Yield complete and overdue steps, each optimizer's in ascending order."""
        for key in sorted(self._open, key=lambda k: (k[1], k[0])):
            rows = self._open[key]
            optimizer, step = key
            if self._members <= rows.keys() or self._overdue(optimizer, step):
                yield self._close(key)

    def _overdue(self, optimizer: int, step: int) -> bool:
        """Whether to judge a step without the ranks whose rows are missing."""
        ahead = self._newest[optimizer] - step
        absent = self._members - self._open[optimizer, step].keys()
        passed = all(self._reached.get(rank, -1) > step for rank in absent)
        if passed and any(row.has(Flag.ALONE) for row in self._open[optimizer, step].values()):
            return True
        return ahead >= (LAG_STEPS if passed else LATE_STEPS)

    def rest(self, *, complete: bool = False) -> Iterator[Step]:
        """Yield the remaining steps; with `complete` only those that have the rows of all members."""
        for key in sorted(self._open, key=lambda k: (k[1], k[0])):
            if not complete or self._members <= self._open[key].keys():
                yield self._close(key)

    def _close(self, key: tuple[int, int]) -> Step:
        rows = self._open.pop(key)
        optimizer, step = key
        self._closed[optimizer] = max(step, self._closed.get(optimizer, -1))
        ordered = {rank: rows[rank] for rank in sorted(rows)}
        return Step(step=step, optimizer=optimizer, world=self.world, rows=ordered)
