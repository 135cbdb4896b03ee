"""What is exported of very many ranks, of whose rows most steps have a few."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ddpdebug.exchange.partial import Partial
from ddpdebug.monitor.many_ranks import chosen_step
from ddpdebug.schema.row import Flag, Row, encode
from ddpdebug.schema.step import Step
from ddpdebug.sinks import Saved, StepJudged
from ddpdebug.sinks.prometheus.exporter import PrometheusSink

_WORLD = 100


def _row(rank: int, step: int, **fields: Any) -> Row:
    times = {"step_seconds": 0.2, "forward_seconds": 0.05, "backward_seconds": 0.1, "sync_wait_seconds": 0.05}
    known = {
        "loss": 2.0,
        "params_after_digest": 5,
        "host_private_bytes": 100,
        "host_limit_bytes": 1000,
        **times,
        **fields,
    }
    return Row(rank=rank, step=step, **known)


def _chosen(rows: list[Row]) -> Step:
    whole = Partial()
    for row in rows:
        whole.add_row(encode(row))
    ((key, part),) = whole.steps.items()
    return chosen_step(key, part)


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    """The exporter of rank 0, which speaks for all."""
    now = iter(range(10**6))
    made = PrometheusSink(0, mode="rank0", clock=lambda: float(next(now)))
    for rank in range(_WORLD):
        place = {"node": f"node-{rank // 10}", "local_rank": rank % 10}
        made.write(Saved(kind="fact", payload={"topic": "place", "rank": rank, "value": place}))
    yield made
    made.close()


def _of(sink: PrometheusSink, name: str, **labels: str) -> dict[int, float]:
    found = {}
    for metric in sink.collect(every=True):
        for sample in metric.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                found[int(sample.labels["rank"])] = sample.value
    return found


def test_steps_are_counted_for_all_ranks_that_took_them(sink: PrometheusSink) -> None:
    """Also of those of which no row is here, and what all of a kind have in common with them."""
    for step in range(40):
        odd = Flag.LOSS_NONFINITE if step % 4 == 0 else Flag(0)
        rows = [_row(r, step, flags=int(Flag.CHECKED | (odd if r >= 90 else Flag(0)))) for r in range(_WORLD)]
        sink.write(StepJudged(step=_chosen(rows)))
    everyone = range(_WORLD)
    counted = _of(sink, "ddpdebug_steps_total")
    assert counted.keys() == set(everyone)
    assert {35 <= steps <= 40 for steps in counted.values()} == {True}  # the newest are about to be
    assert len(set(counted.values())) == 1
    assert _of(sink, "ddpdebug_checked_steps_total") == counted
    lost = _of(sink, "ddpdebug_nonfinite_steps_total", what="loss")
    assert {lost[rank] for rank in range(90)} == {0}
    assert {9 <= lost[rank] <= 10 for rank in range(90, _WORLD)} == {True}
    assert set(_of(sink, "ddpdebug_rank_up").values()) == {1}


@pytest.mark.smoke
def test_a_rank_that_is_chosen_because_it_is_slow_is_not_slow_in_the_mean(sink: PrometheusSink) -> None:
    """It was once; in the steps in which it was not, its row is not here."""
    for step in range(100, 150):
        slow = 30 + step - 100
        rows = [_row(rank, step, sync_wait_seconds=0.01 if rank == slow else 0.05) for rank in range(_WORLD)]
        sink.write(StepJudged(step=_chosen(rows)))
    count = _of(sink, "ddpdebug_step_seconds_count")
    assert count[0] == 50
    assert {count[rank] for rank in range(30, 80)} == {0}
    cost = _of(sink, "ddpdebug_straggler_cost_seconds_total")
    assert all(cost[rank] > 0 for rank in range(30, 80))  # by which it made the step longer, it did
    rows = [_row(rank, 150) for rank in range(_WORLD)]
    sink.write(StepJudged(step=Step(step=150, optimizer=0, world=_WORLD, rows=dict(enumerate(rows)))))
    assert {_of(sink, "ddpdebug_step_seconds_count")[rank] for rank in range(1, _WORLD)} == {1}


def test_the_memory_of_a_node_is_not_that_of_the_ranks_that_were_chosen(sink: PrometheusSink) -> None:
    """Their sum would jump with who is first in something."""
    for step in range(100, 200):
        rows = [_row(rank, step, host_private_bytes=50 + (step - 100) // 3) for rank in range(_WORLD)]
        sink.write(StepJudged(step=_chosen(rows)))
    assert _of(sink, "ddpdebug_memory_full_seconds", kind="host") == {}


def test_a_straggler_costs_what_it_costs_in_each_step(sink: PrometheusSink) -> None:
    """Its cost is known in every step, and how long its steps took in few of them."""
    for step in range(100, 400):
        waits = [0.01 if rank == 37 else 0.05 for rank in range(_WORLD)]
        rows = [_row(rank, step, sync_wait_seconds=wait) for rank, wait in enumerate(waits)]
        whole = Step(step=step, optimizer=0, world=_WORLD, rows=dict(enumerate(rows)))
        sink.write(StepJudged(step=whole if step % 60 == 30 else _chosen(rows)))
        if step % 60 == 0:
            list(sink.collect())  # a window begins
    assert _of(sink, "ddpdebug_step_seconds_count")[37] == 5
    (costs,) = [each for each in sink.collect() if each.name == "ddpdebug_all_ranks_mean_straggler_cost_seconds"]
    found = {sample.labels["stat"]: sample.value for sample in costs.samples}
    assert (found["max"], found["sum"], found["p95"]) == pytest.approx((0.04, 0.04, 0))
