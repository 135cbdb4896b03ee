"""What passes between the training thread and the background thread, with the threads switching all the time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdebug.diagnosis.engine import Request
from ddpdebug.exchange.ticks import Alone, Exchange, Tick
from ddpdebug.forensics.element_search import Elements
from ddpdebug.isolation.guard import Guard
from ddpdebug.monitor.detail_requests import Answering
from ddpdebug.probes.handover import Plans, StepStore
from ddpdebug.probes.record import SinceLastStep, StepRecord
from ddpdebug.probes.step_state import StepState
from ddpdebug.schema.row import Flag, Row, encode


@pytest.fixture
def _restless() -> Iterator[None]:
    """Let the threads take turns a hundred thousand times a second."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def _record(step: int, optimizer: int = 0) -> StepRecord:
    return StepRecord(optimizer, step, Flag(0), SinceLastStep())


def _answering(store: StepStore, say: Any, found: Any = None) -> tuple[Answering, list[str]]:
    troubles: list[str] = []
    guard = Guard(lambda part, message: troubles.append(f"{part}: {message}"))
    holders: Any = SimpleNamespace(known=lambda: True, found=found)
    return Answering(StepState(), holders, store, StepStore(), say, guard), troubles


def test_the_store_keeps_the_newest_steps() -> None:
    """By optimizer and step; what is too old is forgotten."""
    store = StepStore(limit=3)
    records = [_record(step) for step in range(4)]
    assert store.newest() is None
    for record in records:
        store.add(record)
    assert store.get(0, 0) is None
    assert [store.get(0, step) for step in (1, 2, 3)] == records[1:]
    assert store.get(1, 3) is None
    assert store.newest() is records[3]


def test_plans_come_due_in_order_and_once() -> None:
    """By kind and step; without a step everything of the kind is due."""
    plans = Plans()
    for step in (3, 5, 4):
        plans.add("stop", step, step)
    plans.add("other", 0, "x")
    assert plans.take("stop", 2) == []
    assert plans.take("stop", 4) == [3, 4]
    assert plans.take("stop") == [5]
    assert plans.take("stop") == []
    assert plans.take("other", 0) == ["x"]


@pytest.mark.usefixtures("_restless")
def test_answers_come_while_training_goes_on() -> None:
    """A step that ends while the background thread looks for another one does not end the exchange."""
    lost: list[str] = []
    answered: list[int] = []
    store = StepStore()
    asked = iter(range(10**9))

    def say(kind: str, **fields: Any) -> None:
        answered.append(fields["step"])

    answering, troubles = _answering(store, say)

    def on_tick(tick: Tick) -> bool:
        for _ in range(400):
            answering.ask([Request(optimizer=0, step=next(asked) % 1000, kind="hyper")])
        answering.work(patient=True)
        return False

    def tell(part: str, message: str) -> None:
        troubles.append(f"{part}: {message}")

    exchange = Exchange(0, 1, lambda generation, members: Alone(), on_tick, lost.append, tell)
    exchange.start()
    for step in range(20_000):
        store.add(_record(step))
        if step % 32 == 0:  # fewer than may wait for a thread that does not get the processor
            exchange.post(encode(Row(step=step)))
    assert exchange.close(60)
    assert (lost, troubles) == ([], [])
    assert len(answered) >= 400


@pytest.mark.usefixtures("_restless")
def test_elements_are_searched_while_training_goes_on() -> None:
    """Searches begin and end in one thread while the other one makes the copies; nothing is lost."""
    said: list[tuple[str, str]] = []
    elements = Elements(0, lambda kind, **fields: said.append((fields["key"], fields["stage"])))
    weight = torch.zeros(8)
    watch: Any = SimpleNamespace(index=0, names=["w"], params=[weight])
    wrong: list[BaseException] = []
    done = threading.Event()

    def background() -> None:
        try:
            for number in range(2000):
                elements.begin(str(number), 0, "w", 0)
                elements.tick()
                while said:
                    key, stage = said.pop()
                    elements.hear(0, {"key": key, "stage": stage, "data": ["same"]}, 1)
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=background)
    thread.start()
    step = 0
    while not done.is_set():
        elements.capture(watch, step)
        step += 1
    thread.join()
    elements.capture(watch, step, last=True)
    elements.tick()
    for key, stage in said:
        elements.hear(0, {"key": key, "stage": stage, "data": ["same"]}, 1)
    assert wrong == []
    assert not elements.busy


def test_a_rank_that_cannot_copy_ends_the_search_for_all() -> None:
    """It says so, and nobody waits for it."""
    said: list[dict[str, Any]] = []
    elements = Elements(0, lambda kind, **fields: said.append(fields))
    elements.begin("k", 0, "gone", 3)
    elements.capture(SimpleNamespace(index=0, names=["other"], params=[torch.zeros(1)]), 3)  # type: ignore[arg-type]
    elements.tick()
    assert [(m["key"], m["stage"]) for m in said] == [("k", "none")]
    elements.hear(0, said[0], 2)
    assert not elements.busy
    assert elements.hear(1, {"key": "k", "stage": "chunks", "data": ["x"]}, 2) is None


def test_copies_of_different_steps_are_not_compared() -> None:
    """Where ranks have come to plan different steps their values differ without any fault."""
    said: list[dict[str, Any]] = []
    elements = Elements(0, lambda kind, **fields: said.append(fields))
    elements.begin("k", 0, "w", 3)
    elements.capture(SimpleNamespace(index=0, names=["w"], params=[torch.zeros(1)]), 3)  # type: ignore[arg-type]
    elements.tick()
    (own,) = said
    elements.hear(0, own, 2)
    elements.hear(1, {**own, "step": 4, "data": ["other"]}, 2)
    assert not elements.busy
    assert len(said) == 1


def test_a_table_of_the_users_that_changes_meanwhile_is_read_again() -> None:
    """The training thread may add modules while they are listed here: no reason to switch anything off."""
    said: list[Any] = []
    store = StepStore()
    store.add(_record(0))
    reads = iter([RuntimeError("dictionary changed size during iteration"), None])

    def holders() -> str:
        if (error := next(reads)) is not None:
            raise error
        return "known"

    answering, troubles = _answering(store, lambda kind, **fields: said.append(fields["value"]), holders)
    answering.ask([Request(optimizer=0, step=0, kind="holders")])
    answering.work(patient=True)
    assert said == []
    answering.work(patient=True)
    assert (said, troubles) == (["known"], [])


def test_an_answer_that_json_cannot_say_is_none() -> None:
    """The other ranks wait for a word; they must not wait for all their ticks."""
    store = StepStore()
    store.add(_record(0))
    said: list[Any] = []

    def say(kind: str, **fields: Any) -> bool:
        said.append(fields["value"])
        return fields["value"] is None

    circle: list[Any] = []
    circle.append(circle)
    answering, _ = _answering(store, say, lambda: circle)
    answering.ask([Request(optimizer=0, step=0, kind="holders")])
    answering.work(patient=True)
    assert said[-1] is None
    assert len(said) == 2
