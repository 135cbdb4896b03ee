"""The memory forensics of a monitor: search for holders, reports of failed allocations, the CPU memory limit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdebug.config.settings import Config
from ddpdebug.detectors.mem.explanation import ExplainingRule
from ddpdebug.disk import Disk
from ddpdebug.forensics.memory.holder_search import HolderSearch
from ddpdebug.forensics.memory.oom import Reports
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.handover import Plans
from ddpdebug.probes.memory import MemoryProbe
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus
from ddpdebug.redaction import Redactor
from ddpdebug.schema.announcements import Announce, Announcement, DeclaredGrowth, ExpectedGrowth, MemoryState

if TYPE_CHECKING:
    from ddpdebug.probes.cpu_memory_limit import CpuLimit


class MemoryForensics:
    """Searches for holders, writes summaries of failed allocations, takes declarations of growth.

    Args:
        add_to: adds evidence to the findings of a code.
        announce: tells all ranks.
        directory: the run directory, None while it is not known.
        plans: carries searches to the training thread.
        redactor: hides what is secret in a summary.
        disk: says whether there is room for one.
    """

    def __init__(  # noqa: PLR0913 - what it depends on
        self,
        bus: Bus,
        state: StepState,
        guard: Guard,
        memory: MemoryProbe,
        add_to: Callable[[str, Mapping[str, Any]], None],
        announce: Announce,
        directory: Callable[[], Path | None],
        *,
        plans: Plans | None = None,
        redactor: Redactor | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.holder_search = HolderSearch(bus, state, plans, entries_of(guard).threads.alone)
        self.reports = Reports(bus, state, guard, memory, add_to, announce, directory, redactor=redactor, disk=disk)
        self._guard, self._memory, self._announce = guard, memory, announce
        self._declared: tuple[ExpectedGrowth, ...] = ()
        self._limit: CpuLimit | None = None

    def install(self, config: Config) -> None:
        """Take the settings; start to count CPU tensors if there is a limit for them."""
        self.reports.level = config.memory_history
        self.reports.rule = ExplainingRule({"threshold": config.threshold})
        if config.memory_limit and self._limit is None:
            from ddpdebug.probes.cpu_memory_limit import CpuLimit  # noqa: PLC0415 - few runs have a limit

            self._limit = CpuLimit(config.memory_limit, entries_of(self._guard), self._memory.note_failure)
            self._memory.measure_with(self._limit)
            self._limit.start()

    def begin(self, rank: int, world: int) -> None:
        """Set rank and world size."""
        self.holder_search.rank = rank
        self.reports.rank, self.reports.world = rank, world

    def hear(self, rank: int, announcement: Announcement | None) -> None:
        """Handle the announcement of a rank; in the background thread, which isolates errors."""
        if isinstance(announcement, MemoryState):
            self.reports.hear(rank, announcement)

    def expect(self, what: str, size: int | None) -> None:
        """Announce intended memory growth to the rules."""
        if not isinstance(what, str) or not what or (size is not None and (not isinstance(size, int) or size <= 0)):
            raise ValueError(
                f"expect_growth() got {what!r}, {size!r}; give a text and a number of bytes above 0, or None"
            )
        self._declared = (*self._declared, ExpectedGrowth(what=what, bytes=size))
        self._announce(DeclaredGrowth(declared=self._declared))

    def flush(self) -> None:
        """Write the reports that have waited for the run directory."""
        self._guard.run("forensics:memory", self.reports.flush)

    def close(self, error: BaseException | None) -> None:
        """Report the error that ends the script, if it is a failed allocation, and stop."""
        run = self._guard.run
        run("forensics:memory", self.reports.failed, error or getattr(sys, "last_value", None))
        run("forensics:memory", self.reports.close)
        if self._limit is not None:
            run("forensics:memory", self._limit.stop)
            self._limit = None
