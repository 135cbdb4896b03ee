"""MEM405: one rank uses much more memory than its peers."""

from __future__ import annotations

from collections.abc import Mapping

from ddpdebug.detectors.comparison import median_without
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import Examples, Findings, Severity, Step, Streak, StreakRule, Threshold
from ddpdebug.detectors.mem.growth import TrendRule
from ddpdebug.detectors.mem.sizes import GIB, MIB, size_text


class MemoryImbalance(StreakRule):
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
    of_several = True
    incident = ("ranks",)
    memory_warm_up = TrendRule.memory_warm_up
    memory_imbalance_device = Threshold(
        256,
        "MiB that a rank's peak lies above the median of the others', on devices",
        source="chosen: a context and its workspaces stay below",
    )
    memory_imbalance_host = Threshold(
        80,
        "MiB that a rank's peak lies above the median of the others', on hosts",
        source="a process that has loaded torch has some 300 MiB; rank 0 has the store, the sinks and often an "
        "evaluation besides",
    )
    memory_imbalance_share = Threshold(
        0.3, "the same as a share of that median", source="chosen: lengths of batches differ by less over a run"
    )
    memory_imbalance_steps = enough = Threshold(20, "steps in a row that show it", source="as `fragmentation_steps`")
    fires_on = Examples(
        lambda: steps(40, odd={2: {"device_peak_bytes": 30 * GIB}}, device_peak_bytes=20 * GIB),
        lambda: steps(40, world=2, odd={0: {"host_peak_bytes": 900 * MIB}}, host_peak_bytes=300 * MIB),
    )
    silent_on = Examples(
        lambda: steps(40, odd={2: {"device_peak_bytes": 22 * GIB}}, device_peak_bytes=20 * GIB),
        lambda: steps(40, odd={0: {"host_peak_bytes": 360 * MIB}}, host_peak_bytes=300 * MIB),
        lambda: steps(27, odd={2: {"device_peak_bytes": 30 * GIB}}, device_peak_bytes=20 * GIB),
        lambda: steps(
            40, odd={0: {"device_peak_bytes": GIB}, 1: {"device_peak_bytes": GIB}}, device_peak_bytes=4 * GIB
        ),
        lambda: steps(40, odd={1: {"host_peak_bytes": 9 * GIB}}, device_peak_bytes=4 * GIB, host_peak_bytes=GIB),
    )

    def shown(self, step: Step) -> Mapping[int, bool] | None:
        if step.optimizer != 0 or step.step < self.memory_warm_up or len(step.rows) < 2:
            return None
        used = _peaks(step)
        least = MIB * (self.memory_imbalance_device if _on_device(step) else self.memory_imbalance_host)
        shows, ordered = {}, sorted(used.values())
        for rank, own in used.items():
            others = median_without(ordered, own)
            shows[rank] = own - others >= max(self.memory_imbalance_share * others, least)
        return shows

    def report(self, step: Step, streaks: Mapping[int, Streak]) -> Findings:
        if len(step.rows) > 2 and 2 * len(self.running(0)) >= len(step.rows):
            return  # two kinds of ranks, none of them the exception
        for rank, streak in streaks.items():
            if streak.length % int(self.enough) == 0:
                yield self.finding(
                    step,
                    step=step.step - streak.length + 1,
                    ranks=(rank,),
                    subject=("device" if _on_device(step) else "host",),
                    evidence={
                        "peak": {str(r): size_text(value) for r, value in _peaks(step).items()},
                        "batch_elements": {str(r): row.batch_elements for r, row in step.rows.items()},
                    },
                )

    def can_show(self, step: Step) -> bool:
        return step.optimizer == 0 and not self.running(0)


def _on_device(step: Step) -> bool:
    return any(row.device_peak_bytes for row in step.rows.values())


def _peaks(step: Step) -> dict[int, int]:
    """Return rank -> the most memory that it has used, in bytes: of its device, or of the host where there is none."""
    on_device = _on_device(step)
    return {r: row.device_peak_bytes if on_device else row.host_peak_bytes for r, row in step.rows.items()}
