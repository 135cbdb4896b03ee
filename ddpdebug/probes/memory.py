"""Memory of this process and its device, and living autograd graphs. Nothing here waits for a device.

Where the numbers come from is a `Provider`, so that everything built on them is tested without a device.
"""

from __future__ import annotations

import os
import resource
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import is_users
from ddpdebug.nested import tensors_in
from ddpdebug.probes.graph_lifetime import LiveGraphs
from ddpdebug.probes.record import Part, StepRecord
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import (
    BackwardBegan,
    Bus,
    FirstForward,
    ForwardBegan,
    ForwardEnded,
    ModuleForwardBegan,
    StepClosing,
)

_STATM = "/proc/self/statm"
_CGROUPS = Path("/sys/fs/cgroup")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_HISTORY_STEPS = 64
_MAX_SHAPES = 16
#: More than any machine has: how a control group of version 1 says that it has no limit.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """The numbers of a memory provider, named like the row's fields."""

    host_bytes: int = 0
    host_private_bytes: int = 0
    host_peak_bytes: int = 0
    host_limit_bytes: int = 0
    device_allocated_bytes: int = 0
    device_reserved_bytes: int = 0
    device_peak_bytes: int = 0
    device_inactive_bytes: int = 0
    device_limit_bytes: int = 0
    device_retries: int = 0


_SAMPLED = tuple([sample.name for sample in fields(MemorySample)])


@dataclass(slots=True)
class MemoryUse(Part, key="probe:memory"):
    """Memory at the end of a step, and its causes: batch size and living graphs."""

    sample: MemorySample = field(default_factory=MemorySample)
    elements: int = 0  # of the inputs of the largest forward
    graphs: int = 0  # earlier steps whose autograd graph is still alive

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return memory, batch size and the number of living graphs."""
        sample = {name: getattr(self.sample, name) for name in _SAMPLED}
        return {**sample, "batch_elements": self.elements, "live_graphs": self.graphs}


@dataclass(slots=True)
class InputSizes(Part, key="probe:input-sizes"):
    """The number of input elements in a step's forwards with gradients."""

    elements: int = 0

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return the number of input elements."""
        return {"input_elements": self.elements}


class Provider(Protocol):
    """A source of memory numbers."""

    def sample(self) -> MemorySample:
        """Return the present numbers; cheap, and without waiting for the device."""


class SystemProvider:
    """The numbers of the operating system and, once it is in use, of the accelerator's allocator."""

    def __init__(self) -> None:
        self._device_limit = 0

    def sample(self) -> MemorySample:
        """Read the counters."""
        resident, private = resident_bytes(_STATM)
        return MemorySample(
            host_bytes=resident,
            host_private_bytes=private,
            host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            host_limit_bytes=host_limit(),
            **self._device(),
        )

    def _device(self) -> dict[str, int]:
        stats = internals.device_memory_stats()
        if not stats:
            return {}
        if not self._device_limit:
            self._device_limit = internals.device_memory_limit()  # asks the driver, so only once
        return {**device_fields(stats), "device_limit_bytes": self._device_limit}


def device_fields(stats: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields of a sample from the nested statistics of a caching allocator."""
    return {
        "device_allocated_bytes": _of_all_pools(stats, "allocated_bytes", "current"),
        "device_reserved_bytes": _of_all_pools(stats, "reserved_bytes", "current"),
        "device_peak_bytes": _of_all_pools(stats, "allocated_bytes", "peak"),
        "device_inactive_bytes": _of_all_pools(stats, "inactive_split_bytes", "current"),
        "device_retries": int(stats.get("num_alloc_retries", 0)),
    }


def _of_all_pools(stats: Mapping[str, Any], name: str, kind: str) -> int:
    return int(stats.get(name, {}).get("all", {}).get(kind, 0))


def resident_bytes(statm: str) -> tuple[int, int]:
    """Return (resident, private) bytes of a process; (0, 0) when it is gone or the system does not report it."""
    try:
        file = os.open(statm, os.O_RDONLY)
    except OSError as error:
        if is_users(error):
            raise
        return 0, 0
    try:
        fields = os.read(file, 128).split()
    except OSError as error:
        if is_users(error):
            raise
        return 0, 0
    finally:
        os.close(file)
    resident, shared = (int(fields[1]), int(fields[2])) if len(fields) > 2 else (0, 0)
    return resident * _PAGE, (resident - shared) * _PAGE


@cache
def host_limit() -> int:
    """Return the memory limit of this process in bytes: of its control group (either version), or of the machine."""
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        if is_users(error):
            raise
        groups = []
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *cgroup_limits(groups, _CGROUPS)])


def cgroup_limits(groups: Iterable[str], root: Path) -> list[int]:
    """Return the limits from a process's control group up to the root; `groups` as in /proc/self/cgroup."""
    limits = []
    for line in groups:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number != "0" and "memory" not in controllers.split(","):
            continue
        base, name = (root, "memory.max") if number == "0" else (root / "memory", "memory.limit_in_bytes")
        place = Path(path.lstrip("/"))
        for folder in (place, *place.parents):
            try:
                text = (base / folder / name).read_text(encoding="utf-8").strip()
            except OSError as error:
                if is_users(error):
                    raise
                continue
            if text.isdecimal() and 0 < int(text) < _NO_LIMIT:
                limits.append(int(text))
    return limits


def private_bytes(pids: Iterable[int]) -> int:
    """Return the private bytes of other processes of ours; ended ones count as 0."""
    return sum(resident_bytes(f"/proc/{pid}/statm")[1] for pid in pids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The memory use of a finished step."""

    step: int
    used: int  # allocated on the device, or private to the process where there is none
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The memory state at the moment of a failed allocation, before the propagating error freed anything."""

    requested: int
    sample: MemorySample
    operation: str | None = None
    lines: Mapping[str, int] = field(default_factory=dict)  # bytes by the line that allocated them
    modules: Mapping[int, int] = field(default_factory=dict)  # bytes by the id of the module that ran
    snapshot: Any = None
    table: str = ""


class MemoryProbe:
    """The training thread's memory probe: samples at the end of each step, batch shapes, living graphs."""

    def __init__(self, bus: Bus, state: StepState) -> None:
        self._bus, self._state = bus, state
        self.provider: Provider = SystemProvider()
        self.graphs = LiveGraphs()
        self.history: deque[Past] = deque(maxlen=_HISTORY_STEPS)
        self.largest = 0  # elements of the largest batch of a finished step
        self.shapes: list[list[int]] = []  # of the newest forward
        self.elements = 0  # of the largest forward of this step
        self._failure: Failure | None = None
        self._begun = False
        bus.on("probe:memory", ForwardBegan, self.inputs)
        bus.on("probe:memory", ModuleForwardBegan, self._begins)
        bus.on("probe:memory", ForwardEnded, lambda event: self.graph(event.outputs()))
        bus.on("probe:memory", BackwardBegan, lambda event: self.graph(tensors_in(list(event.roots))))
        bus.on("probe:memory", StepClosing, self._step_closes)

    def measure_with(self, provider: Provider) -> None:
        """Take the numbers from another provider from now on."""
        self.provider = provider

    def note_failure(self, failure: Failure) -> None:
        """Keep the memory state of a failed allocation until its error is handled."""
        self._failure = failure

    def take_failure(self) -> Failure | None:
        """Return and clear the kept memory state."""
        failure, self._failure = self._failure, None
        return failure

    def inputs(self, event: ForwardBegan) -> None:
        """Record the shapes of a training forward's inputs."""
        if not torch.is_grad_enabled():
            return
        self._begins()
        tensors = event.tensors()
        shapes = [tensor.shape for tensor in tensors if not tensor.is_nested]  # strided nested ones have no shape
        self.shapes = [list(shape) for shape in shapes[:_MAX_SHAPES]]
        elements = sum(shape.numel() for shape in shapes)
        self.elements = max(self.elements, elements)
        self._state.since.parts[InputSizes].elements += elements

    def _begins(self, _: ModuleForwardBegan | None = None) -> None:
        """Report the first forward with gradients: from then on the device is in use."""
        if torch.is_grad_enabled() and not self._begun:
            self._begun = True
            self._bus.emit(FirstForward())

    def graph(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark the graph behind a forward's output or a backward's root."""
        for tensor in tensors:
            if tensor.grad_fn is not None:
                self.graphs.mark(tensor.grad_fn)
                return

    def _step_closes(self, event: StepClosing) -> None:
        event.record.parts[MemoryUse] = self.end_step(event.watch.step)

    def end_step(self, step: int) -> MemoryUse:
        """Return the row's numbers about memory, and begin the next step."""
        sample = self.provider.sample()
        used = sample.device_allocated_bytes or sample.host_private_bytes
        self.history.append(Past(step=step, used=used, elements=self.elements))
        part = MemoryUse(sample, self.elements, self.graphs.end_step())
        self.largest, self.elements = max(self.largest, self.elements), 0
        return part
