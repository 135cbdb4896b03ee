"""Samples: the operating system's numbers, the allocator's, and a limit on CPU tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.cpu_memory_limit import CpuLimit
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.memory import (
    Failure,
    InputSizes,
    MemoryProbe,
    MemorySample,
    SystemProvider,
    cgroup_limits,
    device_fields,
    private_bytes,
)
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, ForwardBegan, Tensors
from ddpdebug.schema.row import Row
from ddpdebug.torch_internals import memory

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
ENTRIES = entries_of(GUARD)


def test_the_current_device_has_another_name_in_torch_2_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of CUDA's devices is read there as well."""
    monkeypatch.delattr(torch.accelerator, "current_device_index")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(memory, "accelerator", lambda: "cuda")
    monkeypatch.setattr(memory.names, "allocator_is_ready", lambda: True)
    monkeypatch.setattr(memory.names, "device_stats", lambda index: {"of": index})
    assert memory.device_memory_stats() == {"of": 3}


class FakeProvider:
    def __init__(self) -> None:
        self.allocated = 0

    def sample(self) -> MemorySample:
        self.allocated += 100
        return MemorySample(device_allocated_bytes=self.allocated, device_limit_bytes=1000)


def test_the_system_tells_what_a_process_has() -> None:
    """Memory that is touched shows as private, and its peak stays."""
    before = SystemProvider().sample()
    block = bytearray(os.urandom(1)) * (64 << 20)
    after = SystemProvider().sample()
    assert after.host_private_bytes - before.host_private_bytes > 50 << 20
    assert after.host_peak_bytes >= after.host_private_bytes
    assert after.host_limit_bytes > after.host_bytes
    del block
    assert private_bytes([os.getpid(), 1 << 30]) > 0


def test_samples_are_fields_of_the_row() -> None:
    """A step's numbers fit into the row under their names."""
    bus, ddp = Bus(Guard(lambda part, message: pytest.fail(f"{part}: {message}"))), cast("Any", None)
    state = StepState()
    probe = MemoryProbe(bus, state)
    probe.measure_with(FakeProvider())
    for inputs in ([torch.zeros(2, 3), torch.zeros(4)], [torch.zeros(5)]):
        bus.emit(ForwardBegan(ddp, (), {}, Tensors(inputs)))
    parts = probe.end_step(0), state.since.parts[InputSizes]
    row = Row(**{name: value for part in parts for name, value in part.columns(cast("Any", None)).items()})
    assert (row.device_allocated_bytes, row.batch_elements, row.live_graphs) == (100, 10, 0)
    assert row.input_elements == 15
    assert probe.shapes == [[5]]
    assert (probe.largest, probe.elements, probe.history[-1].used) == (10, 0, 100)


def test_statistics_of_the_caching_allocator() -> None:
    """Nested as torch returns them, with a counter that some backends lack."""
    pools: dict[str, Any] = {"all": {"current": 7, "peak": 9, "allocated": 50, "freed": 43}}
    names = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
    fields = device_fields({**dict.fromkeys(names, pools), "num_alloc_retries": 3})
    assert fields["device_allocated_bytes"] == fields["device_inactive_bytes"] == 7
    assert (fields["device_peak_bytes"], fields["device_retries"]) == (9, 3)
    assert set(device_fields({}).values()) == {0}


@pytest.mark.parametrize(
    "groups, files, limits",
    [
        (["0::/a/b"], {"a/b/memory.max": "max", "a/memory.max": "4096"}, [4096]),
        (["4:memory:/job"], {"memory/job/memory.limit_in_bytes": "8192"}, [8192]),
        (["4:cpu,memory:/"], {"memory/memory.limit_in_bytes": str(9223372036854771712)}, []),
        (["3:cpu:/x", "broken"], {"x/memory.max": "1"}, []),
    ],
)
def test_control_groups(tmp_path: Path, groups: list[str], files: dict[str, str], limits: list[int]) -> None:
    """Limits of both versions are found on the way up; a group without one says nothing."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup_limits(groups, tmp_path) == limits


def test_the_limit_counts_exactly_and_forgets_what_is_freed() -> None:
    """Views and in-place operations add nothing."""
    limit = CpuLimit(1 << 20, ENTRIES, lambda failure: None)
    limit.start()
    try:
        kept = torch.zeros(1000)
        kept.view(10, 100).t().add_(1)
        assert limit.live == 4000
        for _ in range(50):
            torch.ones(1000).sum()
        assert limit.live == 4000
        assert limit.sample().device_peak_bytes >= 8000
        del kept
        assert limit.live == 0
    finally:
        limit.stop()


def test_the_limit_raises_in_the_operation_that_exceeds_it() -> None:
    """With torch's own error, and with the line and the module that hold most."""
    failures: list[Failure] = []
    limit = CpuLimit(60_000, ENTRIES, failures.append)
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 1000, bias=False))
    limit.start()
    try:
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 80000 bytes"):
            model(torch.zeros(20, 10))
        assert torch.ones(3).sum() == 3
    finally:
        limit.stop()
    (failure,) = failures
    assert failure.requested == 80_000
    assert failure.modules[id(model[0])] == 800 + 400  # its output, and its weight, met there first
    assert any("test_memory.py" in line for line in failure.lines)
