"""What the job lets go is gone: nothing of ddpdebug holds its gradients, batches or graphs beyond their step."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ddpdebug
from ddpdebug.forensics.replay.replay import replay
from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard
from ddpdebug.nested import tensors_in
from ddpdebug.probes import async_copy as device, inputs, loop_calls
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.forward_capture import ForwardCaptures
from ddpdebug.probes.holding import Lost, storage_of
from ddpdebug.probes.record import StepRecord, encode_row
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import BackwardBegan, Bus, ForwardBegan, Gathered, Tensors
from ddpdebug.probes.training_loop.detached_parts import Cuts
from ddpdebug.schema.announcements import DetachedParameters

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


class Watched:
    """The probes of one process, checking every step; the records stay, as in the monitor's ring."""

    def __init__(self) -> None:
        self.troubles: list[str] = []
        self.records: list[StepRecord] = []
        self.guard = Guard(lambda part, message: self.troubles.append(f"{part}: {message}"))
        self.probes = Probes(self.guard, self._emit, lambda *_: None, lambda *_: True)

    def _emit(self, record: StepRecord) -> None:
        self.records.append(record)
        encode_row(record, 0, GUARD)


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    found.probes.patches.install()
    try:
        yield found
    finally:
        found.probes.remove()
        found.probes.release()
    assert found.troubles == []


@pytest.mark.parametrize("clip", [False, True])
def test_gradients_of_finished_steps(watched: Watched, clip: bool) -> None:
    """The records of finished steps hold numbers, whatever was done to the gradients before the step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone: list[Any] = []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        gone += [p.grad.untyped_storage()._weak_ref() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    optimizer.zero_grad()
    assert len(watched.records) == 4
    assert [torch.UntypedStorage._expired(ref) for ref in gone] == [True] * len(gone)


class Far(torch.Tensor):
    """Stands in for a tensor on a device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


@pytest.mark.parametrize("kind", [torch.Tensor, Far])
def test_digests_hold_no_tensor(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read later of tensors, on a device as well, does not keep them."""
    monkeypatch.setattr(device, "_detached_copy", lambda made: (made, lambda: None))
    monkeypatch.setattr(device, "device_fingerprints", lambda some, _: torch.arange(1, len(some) + 1))
    tensors = [torch.ones(3), torch.zeros(2).as_subclass(kind)]
    refs = [weakref.ref(t) for t in tensors]
    later = device.digests(tensors)
    del tensors
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert len(later()) == 2


# --- batches ----------------------------------------------------------------------------------------------------------


class Takes(nn.Module):
    """Accepts anything."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, *args: Any) -> torch.Tensor:
        return self.weight.sum()


class Batch:
    """An object of the user that says when it dies."""

    def __init__(self, told: list[str]) -> None:
        self.x, self._told = torch.ones(3), told

    def __del__(self) -> None:
        self._told.append("gone")


class Own(torch.Tensor):
    """A subclass of the user."""


def _mapped(folder: Path) -> torch.Tensor:
    (folder / "data").write_bytes(bytes(64))
    return torch.from_file(str(folder / "data"), size=16)


_FOREIGN: dict[str, Callable[[Path], torch.Tensor]] = {
    "shared": lambda _: torch.ones(4).share_memory_(),
    "NumPy": lambda _: torch.from_numpy(np.ones(4)),
    "file": _mapped,
    "part of a table": lambda _: torch.ones(2, 4).share_memory_()[:, 1:3].requires_grad_(),
}


def _is_on(found: Any, given: torch.Tensor) -> bool:
    """Return whether this is a plain tensor that lies on the memory of the given one as that does."""
    return type(found) is torch.Tensor and found.is_set_to(given) and found.requires_grad == given.requires_grad


@pytest.mark.parametrize("kind", _FOREIGN)
def test_memory_that_others_count(kind: str, tmp_path: Path) -> None:
    """Memory of a worker, of NumPy or of a file is there while the job has it, and then it is gone, however small."""
    captures, model, x = ForwardCaptures(GUARD), Takes(), _FOREIGN[kind](tmp_path)
    captures.begin(model, (x,), {}, 0)
    (capture,) = captures.current
    assert _is_on(capture.args[0], x)
    assert torch.equal(capture.args[0], x)
    assert capture.pieces == {}
    ref, memory = weakref.ref(x), x.untyped_storage()._weak_ref()
    del x
    assert ref() is None
    assert torch.UntypedStorage._expired(memory)
    assert isinstance(capture.args[0], Lost)


class Dispatched(torch.Tensor):
    """A subclass that does its operations itself."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


_NO_BLOCK: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "COO": (lambda: torch.eye(3).to_sparse(), "Tensor"),
    "CSR": (lambda: torch.eye(3).to_sparse_csr(), "Tensor"),
    "subclass": (lambda: torch.ones(4).as_subclass(Own), "Own"),
    "operations of its own": (lambda: torch.ones(4).as_subclass(Dispatched), "Dispatched"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", _NO_BLOCK)
def test_what_is_no_block_of_memory(kind: str) -> None:
    """It is not referred to at all; what there is instead says what it was, also while the job has it."""
    make, name = _NO_BLOCK[kind]
    captures, model, x = ForwardCaptures(GUARD), Takes(), make()
    captures.begin(model, (x,), {}, 0)
    (capture,) = captures.current
    assert capture.lost() == [f"args[0]: a {name} that is no plain block of memory"]
    assert capture.pieces == {}
    ref = weakref.ref(x)
    del x
    assert ref() is None


def test_objects_die_when_they_would() -> None:
    """An object of the user, and a tensor, end with their last reference; only a small tensor's memory stays."""
    told: list[str] = []
    captures, model, batch, x = ForwardCaptures(GUARD), Takes(), Batch(told), torch.ones(2)
    weakref.finalize(x, told.append, "tensor")
    captures.begin(model, (batch, {"x": x}), {"again": x}, 0)
    (capture,) = captures.current
    assert capture.args[0] is batch
    assert _is_on(capture.args[1]["x"], x)
    assert _is_on(capture.kwargs["again"], x)
    del batch
    assert told == ["gone"]
    del x
    assert told == ["gone", "tensor"]
    assert isinstance(capture.args[0], Lost)
    assert [t.tolist() for t in tensors_in(capture.args)] == [[1.0, 1.0]]
    assert list(inputs.named(model, capture.args, capture.kwargs))
    assert capture.lost() == ["args[0]: a Batch that the script has let go"]


def test_large_inputs_are_there_while_the_job_has_them() -> None:
    """Above the bound nothing is held; what is said when it is gone names bytes, bound and option."""
    captures, model, x = ForwardCaptures(GUARD, limit=1 << 20), nn.Linear(4, 4), torch.ones(1 << 17, 4)  # 2 MiB
    memory = x.untyped_storage()._weak_ref()
    captures.begin(model, (x,), {}, 0)
    (capture,) = captures.current
    assert _is_on(capture.args[0], x)
    del x
    assert torch.UntypedStorage._expired(memory)
    trace = replay(capture)
    assert not trace.complete
    assert trace.reason == (
        "the inputs were not kept: args[0]: 2.0 MiB, above the bound of 1.0 MiB; --keep-inputs raises it"
    )


def test_a_view_counts_with_all_of_its_memory() -> None:
    """Four bytes of a large table would keep the table."""
    captures, model, table = ForwardCaptures(GUARD, limit=1 << 20), nn.Linear(4, 4), torch.ones(1 << 17, 4)
    memory = table.untyped_storage()._weak_ref()
    captures.begin(model, (table[:1],), {}, 0)
    del table
    assert torch.UntypedStorage._expired(memory)


def test_in_place_changes_show_in_what_is_held() -> None:
    """The held memory has the counter of the job's tensor, also when that tensor is gone and a view of it is not."""
    captures, model, x = ForwardCaptures(GUARD), nn.Linear(4, 4), torch.ones(2, 4)
    captures.begin(model, (x,), {}, 0)
    other = x.view(8)
    del x
    assert captures.current[0].changed() == []
    other.add_(1)
    assert captures.current[0].changed() == ["args[0]"]


def test_memory_that_the_job_gives_back() -> None:
    """A storage that was resized to nothing is not read."""
    captures, model, x = ForwardCaptures(GUARD), nn.Linear(4, 4), torch.ones(2, 4)
    captures.begin(model, (x,), {}, 0)
    x.untyped_storage().resize_(0)
    assert captures.current[0].lost() == ["args[0]: its memory was given back"]


def test_modes_of_the_user_see_nothing() -> None:
    """Neither keeping an input, nor letting go of it and keeping it again, is an operation that a mode is told of."""
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    captures, model = ForwardCaptures(GUARD, limit=1 << 10), nn.Linear(4, 4)
    x, large = torch.ones(2, 4), torch.ones(1 << 10, 4)
    with Mode():
        captures.begin(model, (x,), {}, 0)
        assert captures.current[0].pieces
        captures.begin(model, (large,), {}, 0)
        captures.suspect()  # only this holds the large one
        captures.next_step()
        captures.next_step()
        captures.begin(model, (x,), {}, 1)
        captures.next_step()
    assert seen == []


def test_the_bound_holds() -> None:
    """Whatever the sizes, what is held is counted once each, within the bound, and the newest is what is held."""
    generator, model = random.Random(3), Takes()
    captures = ForwardCaptures(GUARD, limit=10_000)
    same = torch.ones(500)
    for _ in range(300):
        x = torch.ones(generator.choice([10, 100, 700, 1500, 2000, 3000]))
        captures.begin(model, (x, same), {}, 0)
        if generator.random() < 0.3:
            captures.next_step()
        held = [capture for capture in (*captures.previous, *captures.current) if capture.pieces]
        pieces = {address: size for capture in held for address, size in capture.pieces.items()}
        assert captures.room.used == sum(pieces.values()) <= 10_000
        address, size = storage_of(x)
        newest = (captures.current or captures.previous)[-1]
        assert (address in newest.pieces) == (size + same.nbytes <= 10_000)
        del x
        strong = {storage_of(v)[0] for s in held for v in s.args if isinstance(v, torch.Tensor)}
        assert strong - {same.data_ptr()} <= pieces.keys()
    captures.clear()
    assert captures.room.used == 0


# --- on suspicion -----------------------------------------------------------------------------------------------------


class Log(nn.Module):
    """Makes NaN of what is below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.log())


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name, value in (("OUT", tmp_path / "run"), ("METRICS", "off"), ("QUIET", 1)):
        monkeypatch.setenv(f"DDPDEBUG_{name}", str(value))
    return tmp_path / "run"


def test_a_bad_batch_is_kept_until_its_step(settings: Path) -> None:
    """Where nothing is kept, the batch of the first micro-batch with a bad loss is, and the replay names its operation.

    The good ones after it, and the bad ones of the next step, go when the script lets them go.
    """
    model = Log()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive: list[list[bool]] = []
    with ddpdebug.watch(model, optimizer, keep_inputs=0) as monitor:
        for step in range(5):
            optimizer.zero_grad()
            memory = []
            for number in range(4):
                x = torch.ones(2, 4) * (-1 if step == 3 and number == 1 else 1)
                memory.append(x.untyped_storage()._weak_ref())
                (model(x).sum() / 4).backward()
                del x
            alive.append([not torch.UntypedStorage._expired(ref) for ref in memory])
            optimizer.step()
            alive.append([not torch.UntypedStorage._expired(ref) for ref in memory])
    assert monitor.guard.off == set()
    finding = next(f for f in monitor.findings if f.code == "NUM301")
    assert finding.evidence["operation"] == "aten.log.default"
    assert finding.location is not None
    assert "test_kept_alive.py" in finding.location
    none = [False] * 4
    assert alive == [none] * 6 + [[False, True, False, False]] + [none] * 3
    assert (settings / "bundles").is_dir()


def test_a_run_that_went_bad_keeps_no_batches(settings: Path) -> None:
    """Only the first bad step is replayed, so only its batch is held."""
    model = Log()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpdebug.watch(model, optimizer, keep_inputs=0) as monitor:
        held = []
        for _ in range(3):
            x = -torch.ones(2, 4)
            memory = x.untyped_storage()._weak_ref()
            model(x).sum().backward()
            del x
            held.append(not torch.UntypedStorage._expired(memory))
            optimizer.step()
    assert held == [True, False, False]
    assert monitor.findings
    assert monitor.guard.off == set()


@pytest.mark.smoke
def test_the_agreement_probe_says_what_it_left_out(settings: Path) -> None:
    """Inputs that are gone by the end of the step are not sent, and that is said once."""
    if torch.distributed.is_initialized():
        pytest.skip("another group")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ddpdebug.watch(model, optimizer, keep_inputs=0, probe_every=1) as monitor:
            told: list[str] = []
            monitor.guard.tell = lambda part, message: told.append(f"{part}: {message}")  # type: ignore[method-assign]
            offered: list[Any] = []
            monitor.agreement.offer = offered.append  # type: ignore[method-assign]
            for keep in (False, False, True):
                x = torch.ones(2, 4)
                model(x).sum().backward()
                if not keep:
                    del x
                optimizer.step()
        assert monitor.guard.off == set()
        assert len(offered) == 1
        (message,) = told
        assert message.startswith("agreement probe: a step was left out: the inputs were not kept: args[0]: 0.0 MiB, ")
        del model
        gc.collect()
    finally:
        torch.distributed.destroy_process_group()
    assert json.loads((settings / "run.json").read_text())["outcome"]


# --- other holders ----------------------------------------------------------------------------------------------------


def test_looking_for_a_cut_keeps_no_activation() -> None:
    """What a forward lets go on its way is gone while the search runs."""
    gone: list[bool] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            ref = weakref.ref(h)
            cut = h.detach().clone()
            del h
            gone.append(ref() is None)
            return self.second(cut)

    model = Model()
    cuts, x = Cuts(model, list(model.first.parameters()), entries_of(GUARD)), torch.ones(2, 4)
    cuts.begin([x])
    model(x)
    names = ("first.weight", "first.bias")
    assert cuts.end() == DetachedParameters(names=names, after="first", before="second")
    assert gone == [True]


NO_DDP: Any = None


def _loop() -> tuple[Bus, list[Any]]:
    told: list[Any] = []
    bus = Bus(GUARD)
    loop_calls.LoopCalls(bus, StepState(), lambda *fact: told.append(fact))
    return bus, told


def test_gathered_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that cuts the gradient is told at backward; its list is not held if large, nor beyond a forward."""
    own = torch.ones(2, requires_grad=True) * 2
    bus, told = _loop()
    bus.emit(Gathered([torch.ones(2), torch.ones(2)], own, "a.py:1"))
    bus.emit(Gathered([torch.ones(2), own], own, "a.py:2"))
    bus.emit(BackwardBegan([]))
    assert [fact.location for fact, _ in told] == ["a.py:1"]

    lists = [torch.ones(2)]
    ref = weakref.ref(lists[0])
    bus.emit(Gathered(lists, own, "a.py:3"))
    bus.emit(ForwardBegan(NO_DDP, (), {}, Tensors(())))  # a forward begins: no backward has followed
    del lists
    assert ref() is None

    monkeypatch.setattr(loop_calls, "BOUND", 15)
    lists = [torch.ones(2), torch.ones(2)]
    ref = weakref.ref(lists[0])
    bus.emit(Gathered(lists, own, "a.py:4"))
    del lists
    assert ref() is None
