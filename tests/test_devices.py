"""A device that fails, and the memory that numbers come to the host in: made by hand, since there is no device here."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdebug import devices
from ddpdebug.errors import DeviceFailedError
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import async_copy
from ddpdebug.probes.record import Part, SinceLastStep, StepRecord, encode_row
from ddpdebug.schema.row import Flag

CPU = torch.device("cpu")
ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


class Stream:
    """What the device has done: all events are reached, or none, or it has failed."""

    def __init__(self) -> None:
        self.done, self.failed, self.asked = True, False, 0

    def event(self, _: torch.device, event: Any = None) -> Any:
        """Stand for `arrival`."""
        return event or SimpleNamespace(query=self.query)

    def query(self) -> bool:
        """Return whether it has been reached; raise what CUDA raises."""
        self.asked += 1
        if self.failed:
            raise RuntimeError(ASSERT)
        return self.done


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """A device of these tests' own, whose tensors are on the CPU, and pools that are empty."""
    made = Stream()
    monkeypatch.setattr(devices, "arrival", made.event)
    monkeypatch.setattr(devices, "_pools", {})
    yield made
    devices.failure.failed, devices.failure.text = False, ""


def test_memory_is_used_again_and_never_given_back(stream: Stream) -> None:
    """By a copy of another shape and dtype too, in inference mode or not, once the one before is over."""
    with torch.inference_mode():
        copy = devices.to_host(torch.arange(6.0).view(2, 3))
    copy.wait()
    assert copy.host.tolist() == [[0, 1, 2], [3, 4, 5]]
    place = copy.host.data_ptr()
    memory = weakref.ref(copy._piece.memory)
    del copy
    copy = devices.to_host(torch.arange(9))
    assert (copy.host.tolist(), copy.host.data_ptr()) == (list(range(9)), place)
    other = devices.to_host(torch.zeros(3))
    assert other.host.data_ptr() != place
    del copy, other
    devices._pools.clear()
    gc.collect()
    assert memory() is not None


def test_memory_that_is_still_written_to_is_left_alone(stream: Stream) -> None:
    """A copy that nobody has waited for is dropped: the next one goes elsewhere until the device has come so far."""
    stream.done = False
    first = devices.to_host(torch.ones(2))
    place = first.host.data_ptr()
    del first
    second = devices.to_host(torch.ones(2))
    assert second.host.data_ptr() != place
    stream.done = True
    third = devices.to_host(torch.ones(2))
    assert third.host.data_ptr() == place


def test_a_device_that_has_failed_is_asked_once(stream: Stream) -> None:
    """Who waits hears of it, all others too, and it is announced once; the memory stays."""
    told: list[str] = []
    call = lambda: told.append(devices.failure.text)  # noqa: E731 - forgotten below
    devices.failure.when(call)
    later = [async_copy._detached_copy(torch.ones(2)) for _ in range(3)]
    memory = [weakref.ref(wait.__self__._piece.memory) for _, wait in later]  # type: ignore[attr-defined]
    stream.failed = True
    for _, wait in later:
        with pytest.raises(RuntimeError, match="device-side assert"):
            wait()
    with pytest.raises(DeviceFailedError):
        devices.to_host(torch.ones(2))
    assert (stream.asked, told) == (1, ["RuntimeError: CUDA error: device-side assert triggered"])
    del later, wait
    devices._pools.clear()
    gc.collect()
    assert all(ref() is not None for ref in memory)
    devices.failure.forget(call)


def _raised(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error, expected",
    [
        (RuntimeError(ASSERT), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"), True),
        (RuntimeError("NCCL error in: x.cpp:1, unhandled cuda error"), True),
        (_raised(ValueError("training has failed"), RuntimeError(ASSERT)), True),
        (DeviceFailedError("x"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), False),
        (KeyError("CUDA error"), False),
        (RuntimeError("shapes cannot be multiplied"), False),
        (None, False),
    ],
)
def test_what_says_that_a_device_has_failed(error: BaseException | None, expected: bool) -> None:
    """Errors after which it works as before do not."""
    assert devices.is_failure(error) is expected


@dataclass(slots=True)
class Held(Part, key="probe:held"):
    """A part that reads a device, and holds memory of it."""

    copy: Any = None

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Read it."""
        self.copy.wait()
        return {}

    def let_go(self) -> None:
        """Give it back."""
        self.copy = None


class Other(Held, key="probe:other"):
    """Another one."""


def test_what_a_row_holds_stays_once_the_device_has_failed(stream: Stream) -> None:
    """The row is made of what the host knows, no part lets go, and none says so by itself."""
    troubles: list[str] = []
    guard = Guard(lambda part, message: troubles.append(f"{part}: {message}"))
    record = StepRecord(0, 3, Flag(0), SinceLastStep())
    for kind in (Held, Other):
        record.parts[kind] = kind(devices.to_host(torch.ones(2)))
    stream.failed = True
    assert encode_row(record, 0, guard)
    assert all(record.parts[kind].copy is not None for kind in (Held, Other))
    assert (troubles, guard.off) == ([], {"probe:held", "probe:other"})
    held = weakref.ref(record.parts[Held].copy.host)
    del record
    gc.collect()
    assert held() is not None


def test_only_the_host_is_looked_at_once_the_device_has_failed(stream: Stream) -> None:
    """Whoever has noticed it: what the background thread and the end do without tensors goes on."""
    guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
    assert devices.failure.note(RuntimeError(ASSERT))
    ran = [
        part
        for part in ("probe:forward", "event:StepBegan", "forensics:elements", "close:memory", "close:hooks")
        if guard.run(part, lambda: True)
    ]
    assert ran == []
    assert all(guard.run(part, lambda: True) for part in ("close:failure", "close:exchange", "diagnosis", "progress"))


def test_what_is_kept_outlives_the_interpreter(tmp_path: Path) -> None:
    """Its destructor does not run while modules are taken apart: what a file would write then stays unwritten."""
    script = """
from ddpdebug import devices
kept, other = open("kept", "w"), open("other", "w")
for file in (kept, other):
    file.write("destroyed")
devices.keep(kept)
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=300)
    assert ((tmp_path / "kept").read_text(), (tmp_path / "other").read_text()) == ("", "destroyed")
