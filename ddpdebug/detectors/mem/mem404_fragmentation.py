"""MEM404: far more device memory is reserved than was ever allocated."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from ddpdebug.detectors.base import Detector, Examples
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.mem.growth import GIB, MIB, size_text
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Row
from ddpdebug.schema.step import Step


class Fragmentation(Detector):
    """The caching allocator keeps much more than live tensors used at their peak, much of it in pieces between them.

    Impact: out of memory while gigabytes are free inside the allocator, or slow steps from cache flushes and retries.

    Diagnosis: `gap` is what is reserved beyond the largest amount ever allocated, so ordinary caching does not count;
    `inactive` lies between live tensors; `retries` are allocations that first had to empty the cache. Print the range
    of the batch shapes. `ddpdebug memory SNAPSHOT` shows the holes of a snapshot.

    Causes:
    - shapes that vary from step to step: sequence length, image size, number of boxes
    - large short-lived tensors beside small long-lived ones, such as evaluation in the middle of training
    - alternation between two workloads of different sizes (generation and training)

    Remedy:
    - set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` on every rank, before the first CUDA call
    - pad or bucket lengths to a few sizes, and run the longest batch first
    - where expandable segments are not available: `PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:256`
    - `torch.cuda.empty_cache()` between two workloads is reasonable, every step is not
    """

    code = "MEM404"
    severity = Severity.WARNING
    title = "far more memory is reserved than allocated"
    stage = 86
    fires_on = Examples(
        lambda: (
            steps(
                30,
                device_allocated_bytes=9 * GIB,
                device_peak_bytes=12 * GIB,
                device_reserved_bytes=20 * GIB,
                device_inactive_bytes=5 * GIB,
            ),
            steps(
                30,
                odd={2: {"device_peak_bytes": 2 * GIB, "device_reserved_bytes": 4 * GIB, "device_inactive_bytes": GIB}},
                device_peak_bytes=2 * GIB,
                device_reserved_bytes=2 * GIB,
            ),
        )
    )
    silent_on = Examples(
        lambda: (
            steps(
                30, device_allocated_bytes=GIB, device_peak_bytes=12 * GIB, device_reserved_bytes=13 * GIB
            ),  # caching
            steps(30, device_peak_bytes=12 * GIB, device_reserved_bytes=20 * GIB, device_inactive_bytes=64 * MIB),
            steps(19, device_peak_bytes=12 * GIB, device_reserved_bytes=20 * GIB, device_inactive_bytes=5 * GIB),
            steps(30),
        )
    )

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._odd: dict[int, int] = {}
        self._retries: dict[int, int] = {}

    def cause(self, finding: Finding) -> tuple[Hashable, ...]:
        return ()

    def detect(self, step: Step) -> Iterator[Finding]:
        if step.optimizer != 0:
            return
        for rank, row in step.rows.items():
            self._odd[rank] = self._odd.get(rank, 0) + 1 if self._fragmented(row) else 0
            self._retries.setdefault(rank, row.device_retries)
        ranks = tuple(rank for rank in step.rows if self._odd[rank] >= self.limit("fragmentation_steps"))
        if not ranks:
            return
        worst = max(ranks, key=lambda rank: _gap(step.rows[rank]))
        row = step.rows[worst]
        yield self.finding(
            step=step.step - self._odd[worst] + 1,
            last_step=step.step,
            ranks=ranks,
            subject=("device",),
            evidence={
                "reserved": size_text(row.device_reserved_bytes),
                "largest_allocated": size_text(row.device_peak_bytes),
                "gap": size_text(_gap(row)),
                "inactive": size_text(row.device_inactive_bytes),
                "retries": row.device_retries - self._retries[worst],
            },
        )

    def _fragmented(self, row: Row) -> bool:
        reserved = row.device_reserved_bytes
        least = max(self.limit("fragmentation_share") * reserved, MIB * self.limit("fragmentation_bytes"))
        return _gap(row) >= least and row.device_inactive_bytes >= self.limit("fragmentation_inactive") * reserved


def _gap(row: Row) -> int:
    return row.device_reserved_bytes - row.device_peak_bytes
