"""MEM404: far more device memory is reserved than was ever allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Fields, Findings, Severity, Step, Streak, StreakRule, Threshold
from ddpdebug.detectors.mem.sizes import GIB, MIB, size_text
from ddpdebug.schema.row import Row


class Fragmentation(StreakRule):
    """The caching allocator keeps much more than live tensors used at their peak, in pieces that others had to miss.

    While no allocation has had to empty the cache first, what is reserved does no harm.

    Impact: out of memory while gigabytes are free inside the allocator, or slow steps from cache flushes and retries.

    Diagnosis: `gap` is what is reserved beyond the largest amount ever allocated, so ordinary caching does not count;
    `inactive` lies between live tensors; `retries` are allocations that first had to empty the cache. Print the range
    of the batch shapes. `python -m torch.cuda._memory_viz` shows the holes of a snapshot.

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
    reads = ("device_reserved_bytes",)
    fragmentation_inactive = Threshold(
        0.1,
        "free pieces of segments in use, as a share of reserved memory",
        source="chosen; cached segments that are wholly free are no fragmentation",
    )
    fragmentation_share = Threshold(
        0.2,
        "memory reserved beyond the largest amount ever allocated, as a share of reserved memory",
        source="chosen: rounding and cached segments stay below",
    )
    fragmentation_steps = enough = Threshold(
        20, "steps in a row that show it", source="chosen: a few long batches in a row are no habit"
    )
    fires_on = Examples(
        lambda: _fragmented(retries=2, allocated=9, peak=12, reserved=20, inactive=5),
        lambda: _fragmented(retries=1, allocated=1, peak=2, reserved=4, inactive=1, ranks=(2,)),
    )
    silent_on = Examples(
        lambda: steps(
            30, device_allocated_bytes=GIB, device_peak_bytes=12 * GIB, device_reserved_bytes=13 * GIB
        ),  # caching
        lambda: steps(30, device_peak_bytes=12 * GIB, device_reserved_bytes=20 * GIB, device_inactive_bytes=64 * MIB),
        lambda: _fragmented(retries=2, count=19, allocated=9, peak=12, reserved=20, inactive=5),
        lambda: _fragmented(retries=0, allocated=20, peak=21, reserved=27, inactive=3),  # on a card with room
        lambda: steps(30),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._retries: dict[int, int] = {}

    def shown(self, step: Step) -> Mapping[int, bool] | None:
        if step.optimizer != 0:
            return None
        if step.chosen:
            self._retries = {rank: retries for rank, retries in self._retries.items() if rank in step.rows}
        for rank, row in step.rows.items():
            if row.device_reserved_bytes:
                self._retries.setdefault(rank, row.device_retries)
        return {rank: self._fragmented(rank, row) for rank, row in step.rows.items()}

    def report(self, step: Step, streaks: Mapping[int, Streak]) -> Findings:
        worst = max(streaks, key=lambda rank: _gap(step.rows[rank]))
        row = step.rows[worst]
        yield self.finding(
            step,
            step=step.step - streaks[worst].length + 1,
            ranks=tuple(streaks),
            subject=("device",),
            evidence={
                "reserved": size_text(row.device_reserved_bytes),
                "largest_allocated": size_text(row.device_peak_bytes),
                "gap": size_text(_gap(row)),
                "inactive": size_text(row.device_inactive_bytes),
                "retries": row.device_retries - self._retries[worst],
            },
        )

    def _fragmented(self, rank: int, row: Row) -> bool:
        reserved = row.device_reserved_bytes
        waste = _gap(row) >= self.fragmentation_share * reserved
        pieces = row.device_inactive_bytes >= self.fragmentation_inactive * reserved > 0
        return waste and pieces and row.device_retries > self._retries[rank]


def _gap(row: Row) -> int:
    return row.device_reserved_bytes - row.device_peak_bytes


def _fragmented(*, retries: int, count: int = 30, ranks: Sequence[int] = range(4), **gib: int) -> tuple[Step, ...]:
    """Return steps of ranks that hold so many GiB, and have emptied the cache so often since the first step."""
    held = {f"device_{name}_bytes": size * GIB for name, size in gib.items()}
    first = {rank: {"device_reserved_bytes": GIB} for rank in ranks}
    return step_at(0, odd=first), *steps(
        count, start=1, odd={rank: {**held, "device_retries": retries} for rank in ranks}
    )
