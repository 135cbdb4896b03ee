"""What the exporter remembers between steps: one `RankState` per rank that it serves. Torch-free.

Written by the exchange's thread, read by the server's: every field is replaced or counted up, never taken apart.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from operator import attrgetter

from ddpdebug.schema.row import Flag, Row

#: Upper bounds of the step-time histogram, seconds.
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
PHASES = ("data", "forward", "backward", "optimizer")
#: Gauges that follow a field of the row; NaN in a step that did not compute it leaves the last known value.
GAUGES = {
    "loss": ("loss", "Mean loss of the last step, unscaled, as given to backward."),
    "grad_norm": ("grad_norm", "2-norm of the gradients after the reduction, before clipping."),
    "local_grad_norm": ("local_grad_norm", "2-norm of the rank's own gradients before the reduction."),
    "loss_scale": ("loss_scale", "Scale of the gradient scaler."),
    "learning_rate": ("lr", "Learning rate of the first parameter group."),
    "clip_threshold": ("clip_max", "Norm to which gradients are clipped."),
    "param_norm": ("param_norm", "2-norm of the weights in the last sampled step; rank 0 only."),
    "update_norm": ("update_norm", "2-norm of their change in that step; rank 0 only."),
    "val_loss": ("val_loss", "Validation loss, as the script told it by observe(), or as seen in its evaluations."),
}
#: What was not finite -> the flag that says so.
NONFINITE = {
    "loss": Flag.LOSS_NONFINITE,
    "local_gradients": Flag.LOCAL_GRADS_NONFINITE,
    "gradients": Flag.GRADS_NONFINITE,
    "inputs": Flag.INPUT_NONFINITE,
    "outputs": Flag.FORWARD_NONFINITE,
    "parameters": Flag.PARAMS_NONFINITE,
}
#: Kind -> field of the row, bytes.
DEVICE_MEMORY = {
    "allocated": "device_allocated_bytes",
    "reserved": "device_reserved_bytes",
    "peak": "device_peak_bytes",
    "inactive": "device_inactive_bytes",
}
#: Metric -> field of the newest row of any optimizer, help; 0 where the system does not tell.
MEMORY = {
    "host_memory_bytes": ("host_bytes", "Resident memory of the process."),
    "host_private_memory_bytes": ("host_private_bytes", "Of these, neither backed by a file nor shared."),
    "host_memory_limit_bytes": ("host_limit_bytes", "Memory limit of the control group, or of the machine."),
    "loader_memory_bytes": ("workers_bytes", "Private memory of the DataLoader's workers."),
    "device_memory_limit_bytes": ("device_limit_bytes", "Memory of the device."),
    "allocation_retries": ("device_retries", "Allocations that succeeded only after the cache was emptied."),
}

_GAUGE_VALUES = attrgetter(*(field for field, _ in GAUGES.values()))
_PHASE_VALUES = attrgetter(*(f"{phase}_seconds" for phase in PHASES))
#: In such a step NaN is a value or says that there is none.
_CERTAIN = int(Flag.CHECKED | Flag.LOSS_NONFINITE | Flag.LOCAL_GRADS_NONFINITE | Flag.GRADS_NONFINITE)
#: So many gauges are known in every step that is certain; those after them rarely.
_OFTEN = list(GAUGES).index("param_norm")
_NONFINITE = {what: int(flag) for what, flag in NONFINITE.items()}
_ANY_NONFINITE = sum(_NONFINITE.values())
_SKIPPED, _CHECKED = int(Flag.SKIPPED), int(Flag.CHECKED)
_GUARDED = int(Flag.GUARD_SKIPPED)
_UNSYNCED = int(Flag.UNSYNCED_BACKWARD | Flag.BYPASS)


class RankState:
    """What is known of one rank."""

    def __init__(self) -> None:
        self.row: Row | None = None  # of the optimizer that is followed
        self.newest: Row | None = None  # of any optimizer
        self.seen = 0.0
        self.up = True
        self.values = [math.nan] * len(GAUGES)
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.step_seconds = 0.0
        self.phase_seconds = [0.0] * len(PHASES)
        self.phase_counts = [0] * len(PHASES)
        self.steps = self.checked = self.skipped = self.clipped = self.unsynced = self.guarded = 0
        self.nonfinite = dict.fromkeys(NONFINITE, 0)
        # where it runs
        self.node = ""
        self.local_rank = ""
        self.gpu = ""

    def add(self, row: Row, now: float) -> None:
        """Take one row; called once per rank and step."""
        self.newest, self.seen = row, now
        flags = row.flags
        self.steps += 1
        if flags:
            self._count(flags)
        if row.clip_norm > row.clip_max:
            self.clipped += 1
        if self.row is not None and row.optimizer != self.row.optimizer and row.step <= self.row.step:
            return
        self.row = row
        certain = flags & _CERTAIN
        for i, value in enumerate(_GAUGE_VALUES(row)):
            if value == value or (certain and i < _OFTEN):  # noqa: PLR0124 - NaN: keep the last known value
                self.values[i] = value
        if row.step_seconds >= 0:  # not when unknown, which is NaN
            self.buckets[bisect_left(BUCKETS, row.step_seconds)] += 1
            self.step_seconds += row.step_seconds
        for i, seconds in enumerate(_PHASE_VALUES(row)):
            if seconds >= 0:
                self.phase_seconds[i] += seconds
                self.phase_counts[i] += 1

    def _count(self, flags: int) -> None:
        self.checked += bool(flags & _CHECKED)
        self.skipped += bool(flags & _SKIPPED)
        self.guarded += bool(flags & _GUARDED)
        self.unsynced += bool(flags & _UNSYNCED)
        if flags & _ANY_NONFINITE:
            for what, bit in _NONFINITE.items():
                if flags & bit:
                    self.nonfinite[what] += 1
