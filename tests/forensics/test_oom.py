"""A failed allocation is described before its error goes on."""

from __future__ import annotations

import json
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpdebug.config.settings import Config
from ddpdebug.detectors.mem.explanation import explain, what_if
from ddpdebug.disk import Disk, Free
from ddpdebug.forensics.memory import oom
from ddpdebug.forensics.memory.memory import MemoryForensics
from ddpdebug.forensics.memory.oom import Reports, is_out_of_memory, requested_bytes, where
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.memory import Failure, MemoryProbe, MemorySample
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, ForwardBegan, ModuleForwardBegan, Tensors
from ddpdebug.schema.announcements import AllocationFailure, MemoryState

GIB = 1 << 30


def raised(function: Any) -> BaseException:
    try:
        function()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def fail(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 80 GiB")


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fail()
        return x


class Calling(nn.Module):
    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.function()
        return x


class Deep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        fail()
        return grad


class Rank:
    """What the reports of a rank stand on."""

    def __init__(self) -> None:
        self.guard = Guard(lambda part, message: None)
        self.bus, self.state = Bus(self.guard), StepState()
        self.memory = MemoryProbe(self.bus, self.state)
        self.memory.measure_with(FakeProvider())

    def forward(self) -> None:
        """Begin a forward of three numbers."""
        ddp: Any = None
        self.bus.emit(ForwardBegan(ddp, (), {}, Tensors(torch.zeros(3))))


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.mark.parametrize(
    "error, size",
    [
        (raised(fail), int(2.5 * GIB)),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 640 bytes."),
            640,
        ),
        (MemoryError(), None),
        (RuntimeError("CUDA error: out of memory"), None),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, size: int | None) -> None:
    """Errors of devices, of the host's allocator and of Python, with the size where they name it."""
    assert is_out_of_memory(error)
    assert requested_bytes(str(error)) == size


def test_other_errors_do_not_count() -> None:
    """Neither does none."""
    assert not any(map(is_out_of_memory, (None, ValueError("out of memory"), RuntimeError("shape mismatch"))))


def test_phase_and_module(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the frames that the error has left."""
    found = where(raised(lambda: nn.Sequential(nn.Identity(), Failing())(torch.ones(2))), rank.state)
    assert (found["phase"], found["module"]) == ("forward", "Failing")
    assert "test_oom.py:" in found["location"]
    for function in (nn.functional.mse_loss, nn.MSELoss()):
        apart = partial(function, torch.ones(2), torch.ones(3))
        assert where(raised(apart), rank.state)["phase"] == "loss"
        inside = Calling(apart)
        assert where(raised(partial(inside, torch.ones(2))), rank.state)["phase"] == "forward"
    loss = Deep.apply(torch.ones(2, requires_grad=True)).sum()
    assert where(raised(loss.backward), rank.state)["phase"] == "backward"
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", fail)
    assert where(raised(optimizer.step), rank.state)["phase"] == "optimizer"
    assert where(raised(fail), rank.state)["phase"] == "between"


class FakeProvider:
    def sample(self) -> MemorySample:
        return MemorySample(
            device_allocated_bytes=70 * GIB, device_reserved_bytes=75 * GIB, device_limit_bytes=80 * GIB
        )


def reports(rank: Rank, folder: Path | None, told: list[Any]) -> Reports:
    return Reports(
        rank.bus,
        rank.state,
        rank.guard,
        rank.memory,
        lambda code, evidence: told.append(evidence),
        lambda said, number=None: told.append(said),
        lambda: folder,
    )


def test_the_failing_rank_writes_once_and_tells(rank: Rank, tmp_path: Path) -> None:
    """Numbers from the moment of the failure win over those after it."""
    told: list[Any] = []
    mine = reports(rank, tmp_path, told)
    failure = Failure(
        requested=6 * GIB,
        sample=MemorySample(device_allocated_bytes=78 * GIB, device_limit_bytes=80 * GIB),
        operation="AddmmBackward0",
        snapshot={"segments": []},
        table="| allocated |",
    )
    rank.memory.note_failure(failure)
    error = raised(fail)
    mine.failed(error)
    mine.failed(error)
    mine.failed(ValueError())
    (summary,) = told
    assert isinstance(summary, AllocationFailure)
    assert (summary.allocated, summary.requested, summary.operation) == (78 * GIB, 6 * GIB, "AddmmBackward0")
    folder = tmp_path / "ranks" / "0" / "memory"
    assert sorted(path.name for path in folder.iterdir()) == ["step-0-snapshot.pickle", "step-0.json", "step-0.txt"]
    assert json.loads((folder / "step-0.json").read_text())["cause"]["kind"] == "first step"
    text = (folder / "step-0.txt").read_text()
    assert text.startswith("an allocation failed: rank 0 · step 0 · between · AddmmBackward0")
    assert "| allocated |" in text
    assert pickle.loads((folder / "step-0-snapshot.pickle").read_bytes()) == {"segments": []}


def test_a_summary_is_explained_with_the_thresholds_of_the_run(rank: Rank, tmp_path: Path) -> None:
    """As the finding is: 2 GiB in pieces do not explain 6 GiB, unless the user says so."""
    kinds = []
    for number, threshold in enumerate(({}, {"oom_free": 0.3})):
        forensics = MemoryForensics(
            rank.bus, rank.state, rank.guard, rank.memory, lambda *_: None, lambda *_: None,
            lambda number=number: tmp_path / str(number),
        )  # fmt: skip
        forensics.install(Config(threshold=threshold))
        sample = MemorySample(device_allocated_bytes=78 * GIB, device_reserved_bytes=80 * GIB)
        rank.memory.note_failure(Failure(requested=6 * GIB, sample=sample))
        forensics.reports.failed(raised(fail))
        (file,) = (tmp_path / str(number)).rglob("*.json")
        kinds.append(json.loads(file.read_text())["cause"]["kind"])
    assert kinds == ["first step", "fragmentation"]


def test_other_ranks_write_when_they_hear_of_it(rank: Rank, tmp_path: Path) -> None:
    """Each once, and what is heard of them becomes evidence; the own words do not come back."""
    told: list[Any] = []
    mine = reports(rank, tmp_path, told)
    mine.rank = 1
    mine.hear(3, AllocationFailure(shapes=((8, 4096),), elements=32768))
    (summary,) = told
    assert (type(summary), summary.failed, summary.rank) == (MemoryState, False, 1)
    assert (
        (tmp_path / "ranks" / "1" / "memory" / "step-0.txt").read_text().startswith("an allocation failed on another")
    )
    mine.hear(1, summary)
    assert told[1:] == [{"batch": {"1": "0 elements (none yet)", "3": "32768 elements (8x4096)"}}]


def test_the_background_thread_reads_no_gradients(rank: Rank) -> None:
    """The training thread may be clearing them: what they take is then in the rest."""
    told: list[Any] = []
    model = nn.Linear(4, 4, bias=False)
    model(torch.ones(1, 4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = OptimizerWatch(optimizer, 0)
    watch.refresh([])
    rank.state.watches.append(watch)
    mine = reports(rank, None, told)
    assert entries_of(rank.guard).threads.begins()
    mine.failed(raised(fail))
    thread = threading.Thread(target=mine.hear, args=(3, AllocationFailure()))
    thread.start()
    thread.join()
    here, there = (summary.split for summary in told)
    assert (here["parameters"], here["gradients"]) == (64, 64)
    assert there["parameters"] == 64
    assert {"gradients_and_other"} == there.keys() - here.keys()
    assert {"gradients", "other"} == here.keys() - there.keys()


def test_a_summary_waits_for_its_directory(rank: Rank, tmp_path: Path) -> None:
    """A rank that fails before it knows where to write does so later."""
    place: list[Path | None] = [None]
    mine = reports(rank, None, [])
    mine._directory = lambda: place[0]
    mine.failed(raised(fail))
    mine.flush()
    place[0] = tmp_path
    mine.flush()
    assert (tmp_path / "ranks" / "0" / "memory" / "step-0.txt").exists()


@pytest.mark.parametrize("wrapped", [True, False])
def test_cuda_tells_before_it_raises(rank: Rank, monkeypatch: pytest.MonkeyPatch, wrapped: bool) -> None:
    """What the observer sees is kept for the summary, with a DDP or without; after the end it does nothing."""
    observers: list[Any] = []
    levels: list[str] = []
    monkeypatch.setattr(oom.internals, "observe_out_of_memory", lambda observer: observers.append(observer) or True)
    monkeypatch.setattr(oom.internals, "record_memory_history", lambda level: levels.append(level) or True)
    monkeypatch.setattr(oom.internals, "memory_snapshot", lambda: {"segments": []})
    mine = reports(rank, None, [])
    mine.level = "light"
    begins = rank.forward if wrapped else partial(rank.bus.emit, ModuleForwardBegan(nn.Identity(), (), {}))
    with torch.no_grad():
        begins()
    assert observers == []
    begins()
    begins()
    (observer,) = observers
    assert levels == ["light"]
    observer(0, 4096, 80 * GIB, GIB)
    failure = rank.memory.take_failure()
    assert failure is not None
    assert (failure.requested, failure.sample.device_allocated_bytes) == (4096, 70 * GIB)
    assert failure.snapshot == {"segments": []}
    mine.close()
    observer(0, 4096, 80 * GIB, GIB)
    assert rank.memory.take_failure() is None


FAILED = AllocationFailure(
    phase="forward",
    steps=40,
    world=4,
    requested=2 * GIB,
    allocated=70 * GIB,
    reserved=70 * GIB,
    limit=80 * GIB,
    split={"parameters": 8 * GIB, "gradients": 8 * GIB, "optimizer_state": 16 * GIB, "other": 38 * GIB},
    shapes=((8, 1024),),
    elements=8192,
    largest_elements=8192,
    curve=tuple((step, 60 * GIB, 8192) for step in range(40)),
)


@pytest.mark.parametrize(
    "changes, kind, words",
    [
        ({"elements": 32768, "shapes": ((8, 4096),)}, "batch", "8x4096 have 32768 elements"),
        ({"reserved": 75 * GIB}, "fragmentation", "5 GiB are free"),
        ({"curve": tuple((s, (30 + s) * GIB, 1) for s in range(40))}, "leak", "1 GiB a step"),
        ({"phase": "optimizer", "steps": 0}, "optimizer state", "16 GiB for these"),
        ({"steps": 0, "largest_elements": 0, "curve": ()}, "first step", "does not fit (parameters 8 GiB"),
        ({"lines": {"a.py:7": 36 * GIB, "unknown": 9}}, "line", "36 GiB of 70 GiB: a.py:7; the step before ended"),
        ({"lines": {"a.py:7": 39 * GIB}}, "unknown", "close to the limit"),  # parameters are in it
        ({"lines": {"a.py:7": 34 * GIB}}, "unknown", "close to the limit"),
        ({"lines": {"unknown": 36 * GIB}}, "unknown", "close to the limit"),
        ({"lines": {"/x/site-packages/torch/nn/functional.py:9": 36 * GIB}}, "unknown", "close to the limit"),
        ({"lines": {"a.py:7": 36 * GIB}, "steps": 0, "curve": ()}, "first step", "does not fit (parameters 8 GiB"),
        ({}, "unknown", "close to the limit"),
        ({"curve": tuple((s, min(60, 20 + 9 * s) * GIB, 1) for s in range(40))}, "unknown", "close to the limit"),
    ],
)
def test_the_likely_cause(changes: Mapping[str, Any], kind: str, words: str) -> None:
    """By evidence: a larger batch, holes, a leak, the first optimizer step, or simply too much."""
    found = explain(replace(FAILED, **changes))
    assert found.kind == kind
    assert words in found.text
    assert found.actions


def test_what_if_counts_what_would_be_saved() -> None:
    """Sharding the state over four ranks saves three quarters of it."""
    ideas = what_if(FAILED)
    assert "`ZeroRedundancyOptimizer` over 4 ranks: saves about 12 GiB" in ideas
    assert any("checkpoint" in idea and "24 GiB" in idea for idea in ideas)


def test_a_snapshot_leaves_the_room_to_the_job(rank: Rank, tmp_path: Path) -> None:
    """The summaries are small and are written; the finding says why there is no snapshot."""
    told: list[Any] = []
    mine = reports(rank, tmp_path, told)
    mine.disk = Disk(free=lambda _: Free(100 << 20, 1 << 40, None))
    failure = Failure(requested=6 * GIB, sample=MemorySample(), operation=None, snapshot={"segments": []}, table="")
    rank.memory.note_failure(failure)
    mine.failed(raised(fail))
    names = sorted(path.suffix for path in (tmp_path / "ranks/0/memory").iterdir())
    assert names == [".json", ".txt"]
    assert any("snapshot.pickle not written" in str(key) for item in told if isinstance(item, dict) for key in item)
    assert mine.disk.left_out == {"snapshots": 1}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "ranks/0/memory").iterdir()} == {0o600}
