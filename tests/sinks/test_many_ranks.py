"""One endpoint for a thousand ranks: aggregates, the ranks that are shown apart, and what a scrape costs."""

from __future__ import annotations

import http.client
import math
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import pytest
from prometheus_client.core import Metric

from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Digest, Flag, Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import FindingRaised, RunStarted, StepJudged
from ddpdebug.sinks.prometheus.exporter import SERIES_OF_ALL, PrometheusSink
from ddpdebug.sinks.prometheus.many import EVERY_RANK, EXTREMES, PREFIX, SHOWN, Shown

#: name and the values of all labels but the run's, sorted by label -> value
Samples = dict[tuple[str, ...], float]
Value = TypeVar("Value", float, Digest)


class Job:
    """A large job as rank 0 sees it."""

    def __init__(self, world: int = 200) -> None:
        self.now, self.world, self.step = 1000.0, world, -1
        self.sink = PrometheusSink(0, mode="rank0", clock=lambda: self.now)
        self.sink.write(RunStarted(run_id="r", rank=0, world=world, directory=None, config={}, versions={}))

    def steps(self, count: int = 1, gone: tuple[int, ...] = (), **fields: Sequence[float | Digest]) -> None:
        """Take steps, a second each, of all ranks but some."""
        for _ in range(count):
            self.step += 1
            self.now += 1
            rows = {
                rank: Row(rank=rank, step=self.step, **{name: values[rank] for name, values in fields.items()})  # type: ignore[arg-type]
                for rank in range(self.world)
                if rank not in gone
            }
            self.sink.write(StepJudged(step=Step(step=self.step, optimizer=0, world=self.world, rows=rows)))

    def values(self, one: int, value: Value, usual: Value) -> list[Value]:
        """Return what all ranks but one have alike."""
        return [value if rank == one else usual for rank in range(self.world)]

    def found(self, *, every: bool = False) -> Samples:
        """Look."""
        found = {}
        for metric in self.sink.collect(every=every):
            assert isinstance(metric, Metric)
            for sample in metric.samples:
                labels = sorted((name, value) for name, value in sample.labels.items() if name not in {"run_id", "run"})
                found[sample.name, *[value for _, value in labels]] = sample.value
        return found

    def shown(self) -> set[int]:
        """Return the ranks that have series of their own."""
        return {int(key[1]) for key in self.found() if key[0] == "ddpdebug_steps_total"}


@pytest.fixture
def job() -> Iterator[Job]:
    """Watch two hundred ranks."""
    made = Job()
    yield made
    made.sink.close()


def test_aggregates_are_those_of_all_ranks(job: Job) -> None:
    """Computed here in another way; who holds an extreme is its own series, so that no label changes with it."""
    chance = random.Random(3)
    losses = [chance.uniform(1, 2) for _ in range(job.world)]
    job.steps(loss=losses)
    found = job.found()
    ordered = sorted(losses)
    stats = {"min": min(losses), "max": max(losses), "mean": statistics.fmean(losses), "sum": math.fsum(losses)}
    assert {stat: found["ddpdebug_all_ranks_loss", stat] for stat in stats} == pytest.approx(stats)
    for stat, share in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95)):
        place = ordered.index(found["ddpdebug_all_ranks_loss", stat])
        assert abs(place - share * job.world) <= 1
    assert found[EXTREMES, "loss", "", "max"] == losses.index(max(losses))
    assert found[EXTREMES, "loss", "", "min"] == losses.index(min(losses))


def test_a_rank_without_a_value_does_not_count(job: Job) -> None:
    """NaN is no extreme, and what no rank knows is absent."""
    job.steps(loss=job.values(7, math.nan, 2.0))
    found = job.found()
    assert (found["ddpdebug_all_ranks_loss", "max"], found["ddpdebug_all_ranks_loss", "sum"]) == (2, 2 * 199)
    assert ("ddpdebug_all_ranks_val_loss", "max") not in found


def test_counts_and_times_of_all_ranks_only_grow(job: Job) -> None:
    """The first NaN of another rank shows in the sum, also where it is not the largest count."""
    key = ("ddpdebug_all_ranks_nonfinite_steps", "sum", "loss")
    seen = []
    for rank in (3, 3, 5):
        job.steps(flags=job.values(rank, Flag.LOSS_NONFINITE, 0), step_seconds=[0.5] * job.world)
        seen.append(job.found()[key])
    assert seen == [1, 2, 3]
    found = job.found()
    assert found["ddpdebug_all_ranks_step_seconds_count",] == 3 * job.world
    assert found["ddpdebug_all_ranks_step_seconds_sum",] == pytest.approx(1.5 * job.world)
    job.steps(20, step_seconds=[0.5] * job.world)  # until the usual step is known
    buckets = {float(k[1]): v for k, v in job.found().items() if k[0] == "ddpdebug_all_ranks_step_seconds_bucket"}
    assert {bound >= 0.5: count for bound, count in buckets.items()} == {False: 0, True: 23 * job.world}


def test_the_rank_that_the_others_wait_for_is_named(job: Job) -> None:
    """Whatever phase it loses its time in, and although all steps take alike; only late steps count."""
    usual = {"step_seconds": [1.0] * job.world, "backward_seconds": [0.5] * job.world}

    def local(slow: int) -> dict[str, list[float]]:
        waits = job.values(slow, 0.1, 0.4)
        return {"sync_wait_seconds": waits, "backward_local_seconds": [0.5 - wait for wait in waits]}

    job.steps(100, **usual, **local(9))
    job.found()
    job.now += 60
    job.found()
    job.now += 60
    job.steps(10, **usual, **local(150), collective_seconds=[0.1] * job.world)
    found = job.found()
    assert {9, 150} <= job.shown()
    assert found[EXTREMES, "mean_own_seconds", "", "max"] == 150
    assert found["ddpdebug_all_ranks_mean_own_seconds", "max"] == pytest.approx(0.8)
    assert found["ddpdebug_all_ranks_mean_own_seconds", "p50"] == pytest.approx(0.5)
    assert found["ddpdebug_all_ranks_mean_phase_seconds", "backward", "max"] == pytest.approx(0.5)
    assert found["ddpdebug_all_ranks_mean_wait_seconds", "reduction", "p50"] == pytest.approx(0.4)
    assert found["ddpdebug_all_ranks_mean_wait_seconds", "collectives", "mean"] == pytest.approx(0.1)


def test_what_slow_ranks_cost_is_told_of_all_and_of_the_worst(job: Job) -> None:
    """In all so far, and of late; the one that costs most now is named, whoever has cost most before."""
    job.steps(100, step_seconds=[1.0] * job.world, backward_seconds=job.values(9, 0.1, 0.4))
    job.found()
    job.now += 60
    job.found()
    job.now += 60
    job.steps(10, step_seconds=[1.0] * job.world, backward_seconds=job.values(150, 0.1, 0.4))
    found = job.found()
    assert found["ddpdebug_all_ranks_straggler_cost_seconds", "sum"] == pytest.approx(33)
    assert found[EXTREMES, "straggler_cost_seconds", "", "max"] == 9
    assert found[EXTREMES, "mean_straggler_cost_seconds", "", "max"] == 150
    assert found["ddpdebug_all_ranks_mean_straggler_cost_seconds", "sum"] == pytest.approx(0.3)
    assert found["ddpdebug_straggler_cost_seconds_total", "150"] == pytest.approx(3)
    job.steps(50, step_seconds=[1.0] * job.world, backward_seconds=job.values(3, 0.1, 0.1))  # all alike
    assert job.found()["ddpdebug_all_ranks_straggler_cost_seconds", "sum"] == pytest.approx(33)
    assert 150 in job.shown()


@pytest.mark.parametrize("illness", ["left", "culprit", "outvoted", "not finite"])
def test_ranks_that_are_ill_are_shown_at_once_and_for_a_while(job: Job, illness: str) -> None:
    """Also where all places are taken by those that are merely slow or full."""
    memory = [float(rank) * 1e9 for rank in range(job.world)]
    for _ in range(8):  # others are fullest each time
        memory = [*memory[20:], *memory[:20]]
        job.now += 601
        job.steps(host_private_bytes=memory, step_seconds=memory, backward_seconds=[0.0] * job.world)
        job.found()
    assert 77 not in job.shown()
    ill: dict[str, dict[str, Any]] = {
        "left": {"gone": (77,)},
        "culprit": {},
        "outvoted": {"params_after_digest": job.values(77, Digest(9), Digest(5))},
        "not finite": {"flags": job.values(77, Flag.LOCAL_GRADS_NONFINITE, 0)},
    }
    if illness == "culprit":
        finding = Finding(code="RANK101", severity=Severity.CRITICAL, title="t", ranks=(77,), id="RANK101-1")
        job.sink.write(FindingRaised(finding=finding))
    job.steps(**ill[illness])
    assert 77 in job.shown()
    job.now += 300
    job.steps(10)
    assert 77 in job.shown()
    found = job.found()
    assert found["ddpdebug_rank_up", "77"] == 1
    assert len(job.shown()) <= SHOWN + 1


def test_what_all_ranks_have_tells_nobody_apart(job: Job) -> None:
    """After the reduction a NaN is everywhere: nobody gets a place for it."""
    before = job.shown()
    job.steps(flags=[Flag.GRADS_NONFINITE | Flag.LOSS_NONFINITE] * job.world)
    assert job.shown() == before == {0}


def test_every_rank_says_whether_it_is_up(job: Job) -> None:
    """The rules count them."""
    job.steps()
    job.steps(gone=(4, 5))
    found = job.found()
    assert sum(value for key, value in found.items() if key[0] == "ddpdebug_rank_up") == job.world - 2
    assert (found["ddpdebug_all_ranks_rank_up", "sum"], found[EXTREMES, "rank_up", "", "min"]) == (198, 4)


def test_noise_brings_no_ranks_and_a_slow_one_comes_soon() -> None:
    """Who is first by a little changes all the time; who is shown does not."""
    chance, shown = random.Random(1), Shown()
    ever: Counter[int] = Counter()
    now = 0.0
    for _ in range(400):  # of nearly seven hours
        now += 60
        noise = {rank: 1 + chance.gauss(0, 0.03) for rank in range(1, 1024)}
        ever.update(shown.choose(now, 1024, (), [noise]))
    assert len(ever) <= 8
    seen = shown.choose(now + 60, 1024, (), [{**noise, 500: 1.5}])
    assert 500 in seen


def test_in_ten_minutes_no_more_ranks_are_new_than_there_are_places() -> None:
    """However wildly the order changes, and with whatever illness."""
    chance, shown = random.Random(2), Shown()
    entered: list[tuple[float, int]] = []
    before: frozenset[int] = frozenset()
    for minute in range(300):
        wild = {rank: chance.expovariate(1) for rank in range(1, 1024)}
        ill = {chance.randrange(1, 1024) for _ in range(3)}
        current = shown.choose(60.0 * minute, 1024, [ill], [wild])
        assert len(current) <= SHOWN
        entered += [(minute, rank) for rank in current - before]
        before = current
    for begun in range(290):
        assert sum(begun <= minute < begun + 10 for minute, _ in entered) <= 2 * SHOWN


def test_small_worlds_show_every_rank_and_nothing_new() -> None:
    """Up to the limit as before; beyond it all of them on request."""
    for world, large in ((EVERY_RANK, False), (EVERY_RANK + 1, True)):
        job = Job(world)
        job.steps(loss=[1.0] * world)
        few, every = job.found(), job.found(every=True)
        job.sink.close()
        assert any(key[0].startswith((PREFIX, EXTREMES)) for key in few) is large
        assert not any(key[0].startswith((PREFIX, EXTREMES)) for key in every)
        assert len([key for key in every if key[0] == "ddpdebug_loss"]) == world
        assert (few.keys() == every.keys()) is not large


def test_all_ranks_are_told_of_on_request(job: Job) -> None:
    """By the query, on the same port, each answer from its own text."""
    job.steps(loss=[1.0] * job.world)
    job.sink.serve()
    counts = []
    for path in ("/metrics", "/metrics?detail=all", "/metrics", "/metrics?detail=few"):
        client = http.client.HTTPConnection(job.sink.url.split("/")[2], timeout=60)
        client.request("GET", path)
        counts.append(client.getresponse().read().count(b"\nddpdebug_loss{"))
        client.close()
    assert counts == [1, job.world, 1, 1]


_MEASURE = """
import sys, time, urllib.request
from pathlib import Path
from ddpdebug.schema.row import Row
from ddpdebug.sinks import RunStarted, Saved, StepJudged
from ddpdebug.sinks.prometheus.exporter import PrometheusSink
from ddpdebug.schema.step import Step

def peak() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024

before = peak()
sink = PrometheusSink(0, mode="rank0")
sink.write(RunStarted(run_id="r", rank=0, world=1024, directory=None, config={}, versions={}))
for rank in range(1024):
    place = {"node": f"node{rank // 8}", "local_rank": rank % 8, "metrics": None}
    sink.write(Saved(kind="fact", payload={"topic": "place", "rank": rank, "value": place}))
part = lambda rank: 0.1 * (rank * 7919 % 1000) / 1000
rows = {rank: Row(rank=rank, loss=part(rank), local_grad_norm=part(rank), step_seconds=0.3, backward_seconds=part(rank),
                  data_seconds=part(rank), host_private_bytes=rank) for rank in range(1024)}
sink.write(StepJudged(step=Step(step=0, optimizer=0, world=1024, rows=rows)))
begun = time.process_time()
sink.serve()
text = urllib.request.urlopen(sink.url, timeout=60).read().decode()
spent = time.process_time() - begun
after = peak()
lines = [line for line in text.splitlines() if not line.startswith("#")]
print(len(lines), sum(line.startswith("ddpdebug_step{") for line in lines), spent, after - before)
sink.close()
"""


def test_a_thousand_ranks_are_served_within_the_bounds_of_series_processor_time_and_memory() -> None:
    """Some hundredths of a second of processor time and some MB; the limits of these two are for busy machines."""
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True)
    series, ranks, seconds, megabytes = map(float, done.stdout.split())
    assert 2 <= ranks <= SHOWN + 1
    assert series <= SERIES_OF_ALL + 1024 <= 10_000
    assert seconds < 3
    assert megabytes < 100
