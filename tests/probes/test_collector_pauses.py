"""The time in Python's garbage collector is added up by step, and unknown where not every collection was seen."""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.collector_pauses import CollectorPauses, Pauses
from ddpdebug.probes.entries import STAMPS, Entries, entries_of
from ddpdebug.probes.record import SinceLastStep
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, StepClosing


@pytest.fixture
def guard() -> Guard:
    """A guard under which nothing fails."""
    return Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


@pytest.fixture
def entries(guard: Guard) -> Iterator[Entries]:
    """The entries, closed at the end; nothing is collected by itself in between."""
    gc.disable()
    yield entries_of(guard)
    entries_of(guard).close()
    gc.enable()


@pytest.fixture
def close(guard: Guard, entries: Entries) -> Callable[[], float]:
    """End a step and return its seconds; the first has ended."""
    bus, state = Bus(entries.guard), StepState()
    CollectorPauses(bus, state, guard)

    def end() -> float:
        bus.emit(StepClosing(cast("Any", None), cast("Any", None)))
        seconds = state.since.parts[Pauses].columns(cast("Any", None))["gc_seconds"]
        state.since = SinceLastStep()
        return float(seconds)

    assert math.isnan(end())
    return end


def test_collections_are_added_up(close: Callable[[], float]) -> None:
    """Each is in its own step; one over a large heap takes longer than several over none."""
    assert close() == 0.0
    gc.collect(0)
    gc.collect(0)
    small = close()
    heap = [[number] for number in range(300_000)]
    gc.collect()
    assert close() > small > 0.0
    assert close() == 0.0
    del heap


def test_a_collection_of_another_thread_disturbs_nothing(guard: Guard, entries: Entries) -> None:
    """It may come at any moment, also while times are added up: they are taken one by one."""

    class Disturbed(deque[float]):
        def __iter__(self) -> Iterator[float]:
            raise RuntimeError("deque mutated during iteration")

    pauses = CollectorPauses(Bus(entries.guard), StepState(), guard)
    pauses._stamps = Disturbed([1.0] * STAMPS + [2.5] * STAMPS)
    pauses._collections = sum(one["collections"] for one in gc.get_stats()) - 1
    assert pauses._begin() == 1.5


@pytest.mark.slow
def test_what_was_not_seen_is_not_told(close: Callable[[], float], entries: Entries) -> None:
    """A callback that the script calls or takes away makes a step unknown, and those after it are told again."""
    (note,) = gc.callbacks[:1]
    note("start", {"generation": 0, "collected": 0, "uncollectable": 0})
    gc.collect()
    assert math.isnan(close())
    gc.collect()
    assert close() > 0.0
    kept = gc.callbacks[:]
    gc.callbacks.clear()
    assert math.isnan(close()) is False  # no collection was missed
    gc.collect()
    assert math.isnan(close())
    gc.callbacks[:] = kept
    gc.collect()
    assert close() > 0.0
    entries.close()
    assert note not in gc.callbacks
