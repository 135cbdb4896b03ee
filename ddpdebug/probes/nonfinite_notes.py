"""The notes about non-finite numbers of one step. Filled by `nonfinite`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpdebug.clock import time
from ddpdebug.probes.record import Part, StepRecord
from ddpdebug.schema.details import (
    BadInput,
    EntryGradient,
    LossBackward,
    ModuleCall,
    NearLimit,
    NonfiniteLoss,
    Numerics,
)
from ddpdebug.schema.row import Flag

#: So long a finding waits for what a replay finds; later it is added.
_PATIENCE_SECONDS = 5.0


@dataclass(slots=True)
class Looks(Part, key="probe:numerics-forward"):
    """The notes of forward and backward; all lists are short."""

    compiled: bool = False  # module outputs were not looked at, because of torch.compile
    forwards: int = 0
    forward: list[ModuleCall] = field(default_factory=list)  # module calls with a non-finite output
    later: list[Callable[[], list[ModuleCall | NearLimit]]] = field(default_factory=list)  # the same, still on a device
    near: list[NearLimit] = field(default_factory=list)
    inputs: list[BadInput] = field(default_factory=list)
    module: Any = None  # weak reference to the module whose forward ran last
    prefix: str = ""  # of its modules' paths
    model: str | None = None  # its class
    called: tuple[str, int] | None = None  # file and line that called it
    outputs: list[Any] = field(default_factory=list)  # `Memory` of what it returned
    output_finite: bool | None = None
    entry: EntryGradient | None = None
    later_inputs: list[Callable[[], list[BadInput]]] = field(default_factory=list)
    later_outputs: list[tuple[Any, Any]] = field(default_factory=list)  # ranges, still on a device
    later_entries: list[tuple[Any, Any]] = field(default_factory=list)
    loss: NonfiniteLoss | None = None
    loss_line: str | None = None  # that made a loss whose gradient is non-finite
    loss_backward: LossBackward | None = None
    local: list[int] = field(default_factory=list)  # ids of parameters, in the order of backward
    near_gradients: dict[int, tuple[float, float]] = field(default_factory=dict)  # id -> (largest, limit)
    largest: dict[int, float] = field(default_factory=dict)  # id of a parameter -> largest magnitude of its gradient

    @property
    def noteworthy(self) -> bool:
        """Return whether module calls, inputs or magnitudes contain something to announce."""
        return bool(self.forward or self.inputs or self.near or self.near_gradients)

    def let_go(self) -> None:
        """Drop references to the job's objects; ranges are copied by now, as far as needed."""
        self.module = None
        self.outputs.clear()
        self.later_outputs.clear()
        self.later_entries.clear()


class Replaying:
    """The result of a replay in progress; written once, by the thread that waits for it."""

    def __init__(self, found: Mapping[str, Any] | None = None) -> None:
        self.found = found
        self._until = time.monotonic() + _PATIENCE_SECONDS

    @property
    def awaited(self) -> bool:
        """Return whether the detail of the step still waits for the replay."""
        return self.found is None and time.monotonic() < self._until

    def told(self) -> Mapping[str, Any]:
        """Return the result as known now."""
        return self.found or {"complete": False, "reason": "it was not over yet"}


@dataclass(slots=True)
class Judgement(Part, key="probe:numerics"):
    """The judgement of the step's numbers."""

    detail: Numerics = field(default_factory=Numerics)
    replaying: Replaying | None = None
    later: Callable[[], Flag] | None = None  # completes it with what was still on a device
    certain: bool = False  # the flags about gradients are: a norm that overflowed was confirmed or cleared

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Complete the detail, and return the flags from it."""
        later, self.later = self.later, None
        return {"flags": 0 if later is None else later()}
