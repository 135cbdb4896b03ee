"""A device's phases take the places of the host's, by events that are made by hand: this has not run on CUDA."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddpdebug.devices import captures
from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import device_times
from ddpdebug.probes.device_times import Device, DeviceClock, cuda_device
from ddpdebug.probes.record import StepRecord, encode_row
from ddpdebug.schema.row import Row, decode

#: What an event counts by, so that each phase has a length of its own.
TICKS = {"forward": 1.0, "between": 10.0, "first": 100.0, "last": 1000.0, "reduced": 1e4, "step": 1e5, "buffers": 1e6}


class Stream:
    """A device's stream: how far it is, whether it has got there, and whether it is captured."""

    def __init__(self) -> None:
        self.now, self.made, self.asked, self.done, self.captured = 0.0, 0, 0, True, False

    def event(self) -> Any:
        """Return a new event."""
        self.made += 1
        return Event(self)


class Event:
    """What `torch.cuda.Event` has."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, math.nan

    def record(self) -> None:
        """Be where the stream is."""
        assert not self.stream.captured
        self.at = self.stream.now

    def query(self) -> bool:
        """Return whether it has been reached."""
        self.stream.asked += 1
        return self.stream.done

    def elapsed_time(self, other: Event) -> float:
        """Return milliseconds."""
        return (other.at - self.at) * 1e3


class Slow(nn.Module):
    """Moves the stream on in forward, and as its two gradients come."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream, self.first, self.second = stream, nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.register_buffer("mean", torch.zeros(1))
        self.second.weight.register_hook(lambda _: self.passes("first"))
        self.first.weight.register_hook(lambda _: self.passes("last"))

    def passes(self, name: str) -> None:
        """Let the stream do something."""
        self.stream.now += TICKS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes("forward")
        return self.second(self.first(x))


class Rank:
    """A rank that trains a model, and the rows of its steps."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
        self.probes = Probes(self.guard, self.records.append, lambda *_, **__: None, lambda *_: False)
        self.stream = Stream()
        device = Device(self.stream.event, lambda: self.stream.captured)
        DeviceClock(self.probes.bus, self.probes.state, self.guard, self.probes.hooks, lambda _: device)
        self.probes.patches.install()
        self.model = DistributedDataParallel(Slow(self.stream))
        self.model.register_comm_hook(None, lambda _, bucket: self.reduce(bucket))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Move the stream on in the reduction."""
        self.stream.now += TICKS["reduced"]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def step(self) -> None:
        """Train a step."""
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(3, 2)).sum()
        self.stream.now += TICKS["between"]
        loss.backward()
        self.optimizer.step()

    def row(self) -> Row:
        """Return the newest row."""
        return decode(encode_row(self.records[-1], 0, self.guard))


@contextmanager
def training() -> Iterator[Rank]:
    """Give a rank that has its group for itself, after two steps: its device and its last gradient are known."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = Rank()
    made.step()
    made.step()
    yield made
    made.probes.remove()
    made.probes.release()
    del made.model
    dist.destroy_process_group()


@pytest.fixture
def rank() -> Iterator[Rank]:
    """A rank after two steps."""
    with training() as made:
        yield made


def test_phases_are_those_of_the_device(rank: Rank) -> None:
    """The row has the stream's times, and what comes after the last gradient is waiting."""
    rank.step()
    row = rank.row()
    assert (row.forward_seconds, row.backward_seconds) == (1.0, 11_100.0)
    assert (row.backward_local_seconds, row.sync_wait_seconds) == (1100.0, 10_000.0)
    assert (row.optimizer_seconds, row.collective_seconds) == (0.0, 0.0)
    assert math.isnan(row.copy_seconds)


def test_events_are_used_again(rank: Rank) -> None:
    """Seven are enough for a step, with two around the buffers; none is made while rows are read in time."""
    rank.row()
    rank.step()
    rank.row()
    made = rank.stream.made
    for _ in range(5):
        rank.step()
        rank.row()
    assert rank.stream.made == made


def test_collectives_are_in_no_phase(rank: Rank) -> None:
    """What the stream does in a collective inside of forward is not forward's."""
    clock, model = rank.probes.state.clock, rank.model.module

    def reduces(*_: Any) -> None:
        clock.stop()
        model.passes("buffers")
        clock.go_on()

    model.first.register_forward_hook(reduces)
    rank.step()
    row = rank.row()
    assert (row.forward_seconds, row.collective_seconds) == (1.0, 1e6)


def test_a_device_that_does_not_get_there_is_not_waited_for(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times are unknown, and those of the host do not stand in for them."""
    monkeypatch.setattr(device_times, "_PATIENCE", 0.01)
    rank.step()
    rank.stream.done = False
    row = rank.row()
    assert all(math.isnan(getattr(row, name)) for name in ("forward_seconds", "sync_wait_seconds", "optimizer_seconds"))
    assert row.step_seconds > 0.0
    rank.stream.done = True
    rank.step()
    assert rank.row().forward_seconds == 1.0


def test_nothing_is_recorded_or_asked_during_a_capture(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in a capture has no times of the device, and a row waits with its questions until a capture is over."""
    rank.stream.captured = True
    rank.step()
    rank.stream.captured = False
    assert math.isnan(rank.row().forward_seconds)
    rank.step()
    monkeypatch.setattr(device_times, "_PATIENCE", 0.01)
    device = Device(rank.stream.event, lambda: False)
    mark = device.mark()
    assert mark is not None
    asked = rank.stream.asked
    captures.change(1)
    assert device.mark() is None
    assert not device.wait_for([mark])
    assert math.isnan(device.between(mark, mark))
    assert rank.stream.asked == asked
    captures.change(-1)
    captures.change(-1)
    assert device.wait_for([mark])


def test_what_goes_into_a_graph_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe runs, in autograd's threads neither, nobody asks the device, and afterwards all goes on."""
    for name in ("capture_begin", "capture_end"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda graph: None)
    with training() as rank:
        number = len(rank.records)
        torch.cuda.CUDAGraph.capture_begin(None)  # type: ignore[arg-type]
        rank.step()
        assert len(rank.records) == number
        told: list[Any] = []
        for run in (rank.guard.run, lambda *call: on_thread(rank.guard.run, *call)):
            assert run("probe:forward", told.append, "ran") is None
        assert told == []
        asked = SimpleNamespace(query=lambda: told.append("asked") or True)
        waiting = threading.Thread(target=lambda: (captures.wait_for(asked), told.append("over")))
        waiting.start()
        waiting.join(0.1)
        assert told == []
        torch.cuda.CUDAGraph.capture_end(None)  # type: ignore[arg-type]
        waiting.join()
        assert told == ["asked", "over"]
        rank.step()
        rank.step()
        assert len(rank.records) == number + 2


def test_nothing_waits_in_the_training_thread(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step asks no event for anything, also where the device is far behind."""
    rank.stream.done = False
    monkeypatch.setattr(device_times.time, "sleep", lambda _: pytest.fail("the training thread waits"))
    asked = rank.stream.asked
    rank.step()
    assert rank.stream.asked == asked


def on_thread(call: Any, *args: Any) -> None:
    """Call in another thread, and wait for its end."""
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()


def test_a_capture_before_the_first_step_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs may be captured before any optimizer has stepped, and one within another's capture."""
    for name in ("capture_begin", "capture_end"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda graph: None)
    guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
    probes = Probes(guard, lambda _: None, lambda *_, **__: None, lambda *_: False)
    probes.patches.install()
    try:
        begin, end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end
        ran: list[Any] = []
        for call in (begin, begin, end):
            call(None)  # type: ignore[arg-type]
            ran.append(guard.run("probe:forward", lambda: 1))
        end(None)  # type: ignore[arg-type]
        assert (ran, guard.run("probe:forward", lambda: 1)) == ([None, None, None], 1)
    finally:
        probes.remove()
        probes.release()


def test_the_end_does_not_wait_for_a_capture_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was begun by hand and dropped: what is taken away is, nothing asks the device, and others go on."""
    for name in ("capture_begin", "capture_end"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda graph: None)
    begin = torch.cuda.CUDAGraph.capture_begin
    guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
    probes = Probes(guard, lambda _: None, lambda *_, **__: None, lambda *_: False)
    probes.patches.install()
    torch.cuda.CUDAGraph.capture_begin(None)  # type: ignore[arg-type]
    probes.remove()
    ran = [guard.run(part, lambda: 1) for part in ("close:exchange", "close:last-state", "probe:forward")]
    assert ran == [1, None, None]
    assert torch.cuda.CUDAGraph.capture_begin is begin
    probes.release()
    captures.wait_for(SimpleNamespace(query=lambda: True))  # type: ignore[arg-type]
    assert guard.run("probe:forward", lambda: 1) == 1


class Batches(Dataset[torch.Tensor]):
    """For each batch the host takes longer than the device stands idle for it."""

    def __init__(self, stream: Stream, idle: float) -> None:
        self.stream, self.idle = stream, idle

    def __len__(self) -> int:
        return 100

    def __getitem__(self, _: int) -> torch.Tensor:
        time.sleep(0.01)
        self.stream.now += self.idle
        return torch.zeros(1)


@pytest.mark.parametrize("idle", [0.0, 3.0])
def test_data_that_the_device_does_not_wait_for_take_no_time(rank: Rank, idle: float) -> None:
    """The host waits for a loader while the device has work left to do; of an evaluation few are timed."""
    for number, _ in enumerate(DataLoader(Batches(rank.stream, idle), batch_size=None)):
        if number == 1:
            rank.step()
            break
    assert rank.row().data_seconds == 2 * idle
    for _ in DataLoader(Batches(rank.stream, idle), batch_size=None):
        pass
    rank.step()
    assert rank.row().data_seconds == 64 * idle


def test_each_ddp_has_its_own_number_of_gradients(rank: Rank) -> None:
    """Of two that are trained in turn one has more of them."""
    other = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(other.parameters(), 0.01)
    for _ in range(2):
        other(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        rank.step()
    assert rank.row().backward_local_seconds == 1100.0


def test_a_device_that_is_late_is_asked_less_and_less_often(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for what is not there yet alone."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        rank.stream.done = len(pauses) == 7

    rank.step()
    rank.stream.done, asked = False, rank.stream.asked
    monkeypatch.setattr(device_times.time, "sleep", pause)
    assert rank.row().forward_seconds == 1.0
    assert pauses == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05]
    assert rank.stream.asked - asked < 2 * len(pauses) + 10


def test_what_is_around_a_forward_that_raises_goes_on(rank: Rank) -> None:
    """An optimizer whose closure has tried something that failed has its time."""

    def fails(*_: Any) -> None:
        rank.model.module.passes("step")
        raise ValueError("spoiled")

    def closure() -> Any:
        handle = rank.model.module.second.register_forward_hook(fails)
        with suppress(ValueError):
            rank.model(torch.ones(3, 2))
        handle.remove()
        return 0.0

    rank.model(torch.ones(3, 2)).sum().backward()
    rank.optimizer.step(closure)
    assert rank.row().optimizer_seconds == TICKS["step"] + TICKS["forward"]


def test_what_raises_leaves_nothing_open(rank: Rank) -> None:
    """A forward or a backward that raises does not reach into the next step."""

    def fails(*_: Any) -> None:
        raise ValueError("spoiled")

    handle = rank.model.module.second.register_forward_hook(fails)
    with pytest.raises(ValueError, match=r"^spoiled$"):
        rank.step()
    handle.remove()
    rank.step()
    assert rank.row().forward_seconds == 1.0


def test_a_model_on_another_device_than_the_current_one_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events would go to the wrong stream, and give each rank a context on the first device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert cuda_device(torch.device("cuda", 1)) is None
    assert cuda_device(torch.device("cpu")) is None
    assert cuda_device(torch.device("cuda", 0)) is not None
