"""MEM406: the memory of the host grows steadily."""

from __future__ import annotations

from ddpdebug.detectors.examples import growing, holders
from ddpdebug.detectors.kinds import Examples, Severity, Step, Threshold
from ddpdebug.detectors.mem.growth import GrowthRule, Series
from ddpdebug.detectors.mem.sizes import GIB, MIB
from ddpdebug.schema.announcements import Loader


class HostMemoryGrowth(GrowthRule):
    """The private memory of a rank's process, or of its DataLoader workers, rises steadily: in six blocks of steps.

    It is told while it goes on once it would reach the limit within twenty times as long as it has lasted, else when
    the run ends with it: until then it may be a cache that fills.

    Impact: the kernel kills a process of the job without a Python traceback (exit by signal 9), often a loader worker.

    Diagnosis: the phase says whether the trainer (`host`) or its loader workers grow. Where the evidence names a
    holder, read the line that fills it. Memory that Python objects other than tensors take has no holder here: compare
    two `tracemalloc` snapshots. Pages that are shared or backed by a file are left out, they can be given back.

    Causes:
    - `DataLoader workers`: caches in `__getitem__` (decoded images, open files), once per worker
    - `DataLoader workers`: a data set of many small Python objects: reference counts make forked workers copy its pages
    - tensors, predictions or log records that are kept in a list or a dictionary on the CPU, with or without their
      graph
    - `itertools.cycle(loader)`, which keeps every batch of the first epoch
    - allocator growth with many threads and varying sizes, without any leak in Python

    Remedy:
    - `DataLoader workers`: bound caches (`functools.lru_cache(maxsize=...)`); keep sample metadata in one numpy array,
      one tensor or a memory map instead of lists of objects
    - detach what is stored and write it out in pieces; bound caches
    - replace `cycle` by a generator that iterates over the loader again; reduce `num_workers` or `prefetch_factor`
    - if the growth is wanted, say so: `ddpdebug.expect_growth("replay buffer", 2 << 30)`
    """

    code = "MEM406"
    severity = Severity.WARNING
    title = "host memory grows steadily"
    series = (
        Series("host", "host_private_bytes", "host_limit_bytes"),
        Series("DataLoader workers", "workers_bytes", "host_limit_bytes", searched=False),
    )
    memory_growth_host = least = Threshold(
        24,
        "MiB that the blocks must bring together, of the host",
        source="the C library's heap alone was seen to grow by 11 MiB over 48 steps of a small model with nothing kept",
    )
    fires_on = Examples(
        lambda: growing("host_private_bytes", lambda step: 300 * MIB + MIB * step, 70, holders=holders("seen")),
        lambda: growing("workers_bytes", lambda step: 100 * MIB + MIB * step, 70),
        lambda: growing("host_private_bytes", lambda step: 300 * MIB + MIB * step, 120, limit=2 * GIB),
    )
    silent_on = Examples(
        lambda: growing("host_private_bytes", lambda step: 300 * MIB + MIB * min(step, 160), 200, limit=24 * GIB),
        lambda: growing("host_private_bytes", lambda step: 300 * MIB + 3 * MIB * min(step, 40), 90),
        lambda: growing("host_private_bytes", lambda step: 300 * MIB + 3 * MIB * min(step, 24) + MIB // 30 * step, 90),
        lambda: growing(
            "host_private_bytes", lambda step: 300 * MIB + MIB // 8 * step, 90
        ),  # too little to tell from noise
        lambda: growing("host_private_bytes", lambda step: 300 * MIB + MIB * step, 70, declared=None),
    )

    def subject(self, series: Series, step: Step) -> str:
        loader = _loader(step)
        return f"{series.name} of {loader}" if not series.searched and loader else series.name

    def place_of(self, series: Series, step: Step) -> str | None:
        loader = _loader(step)
        return loader.partition(" at ")[2] or None if not series.searched and loader else None


def _loader(step: Step) -> str | None:
    """Return the data set that the workers of the only loader with workers read, `Pairs at data.py:12`."""
    found = {
        fact.dataset
        for facts in step.facts.values()
        for fact in facts.values()
        if isinstance(fact, Loader) and fact.workers and fact.dataset
    }
    return found.pop() if len(found) == 1 else None
