"""Notes of the calls by which ranks communicate, in one process: its own group has one rank."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce, isend

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.collective_notes import CollectiveNotes
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import BackwardBegan, BatchDelivered, Bus, EpochEnded, StepEnded
from ddpdebug.schema.progress import DATA_ENDED
from ddpdebug.torch_internals.collective_calls import CALLS

home = dist.distributed_c10d


class Group(dist.ProcessGroup):
    """A group that counts as it is told."""

    def __init__(self, name: str, *, messages: bool = False) -> None:
        super().__init__(0, 2)
        self.name, self.messages, self.count = name, messages, 0

    @property
    def group_name(self) -> str:
        """The name that the ranks know it by."""
        return self.name

    def _get_sequence_number_for_group(self) -> int:
        return self.count


@pytest.fixture
def told() -> list[str]:
    """What was said to be off."""
    return []


@pytest.fixture
def guard(told: list[str]) -> Guard:
    """A guard that keeps what it is told."""
    return Guard(lambda part, message: told.append(f"{part}: {message}"))


@pytest.fixture
def bus(guard: Guard) -> Bus:
    """The events of a process."""
    return Bus(guard)


@pytest.fixture
def notes(bus: Bus, guard: Guard, told: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectiveNotes]:
    """Notes that are taken; nothing may be off at the end."""
    monkeypatch.setattr(internals, "anything_compiled", lambda: False)
    made = CollectiveNotes(bus, StepState(world=2), guard)
    yield made
    entries_of(guard).close()
    assert told == []


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _code(name: str) -> Any:
    return inspect.unwrap(getattr(home, name)).__code__


def test_every_function_has_a_look_and_gets_its_code_back(notes: CollectiveNotes, guard: Guard) -> None:
    """All functions that this torch has are looked at, and afterwards have the code that they had."""
    there = [name for name in CALLS if hasattr(home, name)]
    before = {name: _code(name) for name in there}
    assert {"all_reduce", "isend", "barrier", "new_group", "monitored_barrier"} <= before.keys()
    notes.install()
    assert [name for name in there if _code(name) is before[name]] == []
    for name in there:
        ours, own = _code(name), before[name]
        assert (ours.co_varnames, ours.co_firstlineno) == (own.co_varnames, own.co_firstlineno)
        assert {line for *_, line in ours.co_lines()} - {None} == {line for *_, line in own.co_lines()} - {None}
    entries_of(guard).close()
    assert {name: _code(name) for name in there} == before


def _round(bus: Bus, averages: Callable[[nn.Module], object], *, after: bool = True) -> None:
    """Train one step with an optimizer that ends with it; the parameters are averaged `after` it, or before."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    bus.emit(BackwardBegan([]))
    if not after:
        averages(model)
    bus.emit(StepEnded(optimizer))
    if after:
        averages(model)
    del optimizer
    bus.emit(BackwardBegan([]))


def _flat(model: nn.Module) -> None:
    all_reduce(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


def _each(model: nn.Module) -> None:
    all_reduce(torch.ones(3))
    for p in model.parameters():
        all_reduce(p.detach())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("averages", "after", "seen"),
    [
        (_each, True, True),
        (_flat, True, True),
        (lambda model: dist.all_gather([torch.empty(8, 8)], model.weight.detach()), True, False),  # a part
        (lambda _: all_reduce(torch.ones(3)), True, False),  # a loss
        (_each, False, False),  # gradients
    ],
)
def test_parameters_that_the_script_averages_between_steps(
    notes: CollectiveNotes, bus: Bus, averages: Callable[[nn.Module], object], after: bool, seen: bool
) -> None:
    """What is reduced before the step are gradients; an optimizer that ends with its round is no hindrance."""
    notes.install()
    _round(bus, averages, after=after)
    assert notes._state.averages is seen


@pytest.mark.usefixtures("alone")
def test_what_was_imported_earlier_is_noted_with_its_line(notes: CollectiveNotes) -> None:
    """A function that a script has imported before is the same object, and its calls are noted."""
    notes.install()
    assert all_reduce is home.all_reduce
    assert pickle.loads(pickle.dumps(isend)) is isend
    written: list[str] = []
    all_reduce(torch.ones(4, 2))
    notes.write_to(written.append)
    work = dist.broadcast(torch.ones(3, dtype=torch.int64), src=0, async_op=True)
    work.wait()
    dist.all_gather_object([None], "x")
    reduced, sent, *objects = notes.kept()
    assert [text.partition("\t")[0] for text in written][:2] == ["all_reduce", "broadcast"]
    assert (reduced.call.operation, reduced.call.shapes, reduced.call.number) == ("all_reduce", ("float32 [4, 2]",), 1)
    assert (sent.call.shapes, sent.call.number, sent.call.root) == (("int64 [3]",), 2, 0)
    inner = [noted.call.operation.removesuffix("_single") for noted in objects]  # as torch 2.15 has it
    assert inner == ["all_gather_object", "all_gather", "all_gather"]
    assert [noted.call.number for noted in objects] == [3, 3, 4]
    assert all("test_collective_notes.py:" in str(noted.call.location) for noted in notes.kept())


@pytest.mark.usefixtures("alone")
def test_calls_of_any_thread_are_noted(notes: CollectiveNotes) -> None:
    """A thread that has a group of its own is waited for as well."""
    notes.install()
    thread = threading.Thread(target=dist.barrier)
    thread.start()
    thread.join()
    assert [noted.call.operation for noted in notes.kept()] == ["barrier"]


@pytest.mark.usefixtures("alone")
def test_an_error_is_the_users_and_has_the_lines_that_it_has_without_us(notes: CollectiveNotes) -> None:
    """What a call raises goes through the same lines of torch."""

    def raised() -> list[tuple[str, int]]:
        with pytest.raises(TypeError) as caught:
            all_reduce("text")
        return [(entry.name, entry.lineno) for entry in caught.traceback[1:]]

    plain = raised()
    notes.install()
    assert raised() == plain
    assert notes.kept()[-1].call.shapes == ()


def test_messages_do_not_count(notes: CollectiveNotes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo counts messages, and barriers by what they are made of; the numbers that ranks compare do not."""
    monkeypatch.setattr(internals, "counts_messages", lambda group: group.messages)
    group = Group("pair", messages=True)

    def call(operation: str, counted: int) -> int:
        notes.issued(operation, torch.ones(2), 1, None, group)
        group.count += counted
        return notes.kept()[-1].call.number

    assert call("all_reduce", 1) == 1
    assert call("isend", 1) == 0
    assert call("irecv", 1) == 0
    assert call("all_reduce", 1) == 2
    assert notes.number("pair", 4) == 2
    assert call("monitored_barrier", 6) == 0
    assert notes.number("pair", group.count) == 4  # while it runs: the recorder counts two, on each rank
    assert call("all_reduce", 1) == 5
    assert notes.number("pair", group.count) == 5
    assert notes.number("pair", 4) == 2  # as the recorder has it, whose count stands still meanwhile
    other = Group("other", messages=False)
    notes.issued("isend", torch.ones(2), 1, None, other)
    notes.issued("barrier", None, None, None, other)
    assert notes.kept()[-1].call.number == 1


def test_the_end_of_the_data_is_noted(notes: CollectiveNotes, bus: Bus) -> None:
    """A loader that has no more batches is worth knowing after the end; one that failed says so itself."""
    for _ in range(3):
        bus.emit(BatchDelivered(None, None))
    bus.emit(EpochEnded(None, failed=True))
    assert notes.kept() == ()
    bus.emit(EpochEnded(None))
    (noted,) = notes.kept()
    assert (noted.call.operation, noted.batches, noted.call.number) == (DATA_ENDED, 3, 0)


def test_nothing_is_put_in_place_where_something_was_compiled(
    bus: Bus, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that guards the code of a function is not compiled anew for us."""
    monkeypatch.setattr(internals, "anything_compiled", lambda: True)
    before = _code("isend")
    CollectiveNotes(bus, StepState(world=2), guard).install()
    assert _code("isend") is before
