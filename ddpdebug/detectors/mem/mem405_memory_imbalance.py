"""MEM405: one rank uses much more memory than its peers."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from ddpdebug.detectors.base import Detector, Examples
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.mem.growth import GIB, MIB, size_text
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Row
from ddpdebug.schema.step import Step


class MemoryImbalance(Detector):
    """One rank's peak of device memory (without a device: of resident memory) stays far above the other ranks' median.

    Impact: this rank decides the batch size for all, and is the one that runs out of memory first.

    Diagnosis: compare `batch_elements`, the inputs of the largest forward in the last step of the window: a rank with
    more has longer samples or a larger batch. If they are alike, look for what runs on this rank only. `nvidia-smi` on
    that node: several processes of the job on one device mean foreign contexts, which are not counted here.

    Causes:
    - longer samples on this rank: sharded by size, or no balancing of lengths
    - work for one rank only: evaluation, EMA, generation, gathering of outputs or of a full checkpoint
    - `torch.load` without `map_location`: every rank puts the tensors on device 0
    - `torch.cuda.set_device(local_rank)` missing or too late, so that all ranks open a context on device 0
    - optimizer states sharded unevenly

    Remedy:
    - shuffle or bucket so that lengths are balanced over ranks
    - gather to the CPU, keep EMA copies there, and load checkpoints with `map_location="cpu"`
    - call `torch.cuda.set_device(local_rank)` before anything touches CUDA, and pass `device_id` to
      `init_process_group`
    """

    code = "MEM405"
    severity = Severity.WARNING
    title = "one rank uses much more memory than its peers"
    stage = 88
    fires_on = Examples(
        lambda: (
            steps(40, odd={2: {"device_peak_bytes": 30 * GIB}}, device_peak_bytes=20 * GIB),
            steps(40, world=2, odd={0: {"host_peak_bytes": 900 * MIB}}, host_peak_bytes=300 * MIB),
        )
    )
    silent_on = Examples(
        lambda: (
            steps(40, odd={2: {"device_peak_bytes": 22 * GIB}}, device_peak_bytes=20 * GIB),
            steps(40, odd={0: {"host_peak_bytes": 360 * MIB}}, host_peak_bytes=300 * MIB),
            steps(27, odd={2: {"device_peak_bytes": 30 * GIB}}, device_peak_bytes=20 * GIB),
            steps(40, odd={0: {"device_peak_bytes": GIB}, 1: {"device_peak_bytes": GIB}}, device_peak_bytes=4 * GIB),
            steps(40, odd={1: {"host_peak_bytes": 9 * GIB}}, device_peak_bytes=4 * GIB, host_peak_bytes=GIB),
        )
    )

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._odd: dict[int, int] = {}

    def cause(self, finding: Finding) -> tuple[Hashable, ...]:
        return (finding.ranks,)

    def detect(self, step: Step) -> Iterator[Finding]:
        if step.optimizer != 0 or step.step < self.limit("memory_warm_up") or len(step.rows) < 2:
            return
        on_device = any(row.device_peak_bytes for row in step.rows.values())
        least = MIB * self.limit("memory_imbalance_device" if on_device else "memory_imbalance_host")
        share, enough = self.limit("memory_imbalance_share"), int(self.limit("memory_imbalance_steps"))
        used = {rank: _peak(row, on_device=on_device) for rank, row in step.rows.items()}
        for rank, own in used.items():
            others = statistics.median(value for other, value in used.items() if other != rank)
            odd = own - others >= max(share * others, least)
            self._odd[rank] = self._odd.get(rank, 0) + 1 if odd else 0
        if len(used) > 2 and 2 * sum(map(bool, self._odd.values())) >= len(used):
            return  # two kinds of ranks, none of them the exception
        for rank in used:
            if self._odd[rank] >= enough and self._odd[rank] % enough == 0:
                yield self.finding(
                    step=step.step - self._odd[rank] + 1,
                    last_step=step.step,
                    ranks=(rank,),
                    subject=("device" if on_device else "host",),
                    evidence={
                        "peak": {str(r): size_text(value) for r, value in used.items()},
                        "batch_elements": {str(r): row.batch_elements for r, row in step.rows.items()},
                    },
                )

    def sees(self, step: Step) -> bool:
        return step.optimizer == 0 and not any(self._odd.values())


def _peak(row: Row, *, on_device: bool) -> int:
    return row.device_peak_bytes if on_device else row.host_peak_bytes
