"""The metrics as Prometheus reads them, over real sockets."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ddpdebug.detectors.catalog import catalog
from ddpdebug.detectors.kinds import EventRule
from ddpdebug.detectors.pages import pages
from ddpdebug.isolation import background
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Digest, Flag, Row
from ddpdebug.schema.run_state import WaitState
from ddpdebug.schema.step import Step
from ddpdebug.sinks import FindingRaised, Met, RunEnded, RunStarted, Saved, StepJudged, Trouble, Waiting
from ddpdebug.sinks.prometheus.exporter import SERIES, SERIES_WITH_FINDINGS, PrometheusSink
from ddpdebug.sinks.prometheus.exposition import openmetrics_of, text_of
from ddpdebug.sinks.prometheus.metrics import LAYER_NAMES, OTHER, SLOTS, Layers

sys.path.append(str(Path(__file__).parent.parent / "support"))
from machine import until

STARTED = RunStarted(
    run_id="r1",
    rank=0,
    world=2,
    directory=Path("runs/r"),
    name="train",
    scheduler_job="7",
    config={"budget": 0.01},
    versions={"torch": "2.13.0", "ddpdebug": "0.1"},
    node="n1",
    local_rank=0,
)
#: Labels of every series.
IDENTITY = ("run_id", "run")
FINDING = Finding(code="RANK101", severity=Severity.CRITICAL, title="t", id="RANK101-1")


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    """Make one, whose clock stands still."""
    made = PrometheusSink(0, clock=lambda: 1000.0)
    yield made
    made.close()


def judged(step: int, optimizer: int = 0, **fields: float) -> StepJudged:
    """Build a step of two ranks that are alike."""
    rows = {rank: Row(rank=rank, step=step, optimizer=optimizer, **fields) for rank in (0, 1)}  # type: ignore[arg-type]
    made = Step(step=step, optimizer=optimizer, world=2, rows=rows)
    return StepJudged(step=made, interval=5, overhead_ratio=0.008)


def scraped(sink: PrometheusSink) -> str:
    """Return what a scrape returns."""
    return sink.page().decode()


def samples(sink: PrometheusSink) -> dict[tuple[str, ...], float]:
    """Scrape: name and label values, sorted by label, -> value."""
    return {
        (sample.name, *[value for name, value in sorted(sample.labels.items()) if name not in IDENTITY]): sample.value
        for family in text_string_to_metric_families(scraped(sink))
        for sample in family.samples
    }


def test_a_step_shows_in_the_next_scrape(sink: PrometheusSink) -> None:
    """Loss, norms, rates, memory, time and the state of the checks."""
    sink.write(STARTED)
    sink.write(
        judged(7, loss=2.5, lr=1e-3, grad_norm=3.0, local_grad_norm=4.0, loss_scale=1024.0, host_bytes=10,
               device_peak_bytes=30, step_seconds=0.2, forward_seconds=0.05)
    )  # fmt: skip
    found = samples(sink)
    expected = {
        ("ddpdebug_step", "0"): 7,
        ("ddpdebug_loss", "0"): 2.5,
        ("ddpdebug_learning_rate", "0"): 1e-3,
        ("ddpdebug_grad_norm", "0"): 3,
        ("ddpdebug_local_grad_norm", "0"): 4,
        ("ddpdebug_loss_scale", "0"): 1024,
        ("ddpdebug_host_memory_bytes", "0"): 10,
        ("ddpdebug_device_memory_bytes", "peak", "0"): 30,
        ("ddpdebug_last_step_timestamp_seconds", "0"): 1000,
        ("ddpdebug_step_seconds_bucket", "+Inf", "0"): None,
        ("ddpdebug_step_seconds_count", "0"): 1,
        ("ddpdebug_step_seconds_sum", "0"): 0.2,
        ("ddpdebug_phase_seconds_sum", "forward", "0"): 0.05,
        ("ddpdebug_phase_seconds_sum", "other", "0"): pytest.approx(0.15),
        ("ddpdebug_phase_seconds_count", "data", "0"): 0,
        ("ddpdebug_overhead_ratio", "0"): 0.008,
        ("ddpdebug_check_interval_steps", "0"): 5,
        ("ddpdebug_internal_errors_total", "0"): 0,
        ("ddpdebug_findings_total", "", "0", "critical"): 0,
        ("ddpdebug_run_info", "0.1", "r", "7", "2.13.0", "2"): 1,
        ("ddpdebug_run_state", "0"): 1,
        ("ddpdebug_rank_info", "", "0", "n1", "0"): 1,
        ("ddpdebug_rank_up", "0"): 1,
        ("ddpdebug_world_size", "0"): 2,
        ("ddpdebug_overhead_budget_ratio", "0"): 0.01,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_a_step_is_parted_into_own_time_and_waiting(sink: PrometheusSink) -> None:
    """They add up to the step; backward is the rank's own until its last gradient, and all of it waiting if unknown."""
    sink.write(STARTED)
    times = {"step_seconds": 1.0, "data_seconds": 0.1, "forward_seconds": 0.2, "backward_seconds": 0.4}
    sink.write(judged(0, **times, backward_local_seconds=0.3, sync_wait_seconds=0.1, collective_seconds=0.05))
    sink.write(judged(1, **times))
    sink.write(judged(2, data_seconds=7.0))  # nobody knows how long the step took
    found = samples(sink)
    own = {key[1]: value for key, value in found.items() if key[0] == "ddpdebug_own_seconds_total"}
    waits = {key[1]: value for key, value in found.items() if key[0] == "ddpdebug_wait_seconds_total"}
    assert own == pytest.approx({"data": 0.2, "forward": 0.4, "backward": 0.3, "optimizer": 0, "other": 0.55})
    assert waits == pytest.approx({"reduction": 0.5, "collectives": 0.05})
    assert sum(own.values()) + sum(waits.values()) == pytest.approx(found["ddpdebug_step_seconds_sum", "0"])
    assert found["ddpdebug_phase_seconds_sum", "backward", "0"] == pytest.approx(0.8)  # as before, all of it


def test_the_first_step_has_the_start_of_the_script_in_it(sink: PrometheusSink) -> None:
    """Its times are nobody's pace, so that none of the means has them; all else of it counts."""
    sink.write(STARTED)
    times = {"data_seconds": 0.1, "forward_seconds": 0.2, "backward_seconds": 0.1, "sync_wait_seconds": 0.1}
    sink.write(judged(0, loss=3.0, step_seconds=60.0, flags=int(Flag.FIRST), **times))
    first = samples(sink)
    assert (first["ddpdebug_steps_total", "0"], first["ddpdebug_loss", "0"]) == (1, 3.0)
    summed = ("step_seconds_count", "step_seconds_sum", "phase_seconds_sum", "phase_seconds_count",
              "own_seconds_total", "wait_seconds_total")  # fmt: skip
    assert {value for key, value in first.items() if key[0].removeprefix("ddpdebug_") in summed} == {0}
    sink.write(judged(1, step_seconds=1.0, **times))
    found = samples(sink)
    assert (found["ddpdebug_step_seconds_count", "0"], found["ddpdebug_step_seconds_sum", "0"]) == (1, 1.0)
    assert found["ddpdebug_own_seconds_total", "other", "0"] == pytest.approx(0.6)


def test_a_rank_costs_what_it_is_slower_than_the_next_one() -> None:
    """In the steps in which it is last: two that are equally slow cost nothing; a rank tells of itself only."""
    sinks = [PrometheusSink(rank) for rank in (0, 1)]
    try:
        for step, waits in enumerate([(0.5, 0.2, 0.4), (0.2, 0.2, 0.4), (0.3, 0.4, 0.4), (math.nan, 0.1, 0.3)]):
            rows = {
                rank: Row(rank=rank, step=step, step_seconds=1.0 if wait == wait else math.nan,  # noqa: PLR0124
                          backward_seconds=0.5, sync_wait_seconds=wait)
                for rank, wait in enumerate(waits)
            }  # fmt: skip
            for sink in sinks:
                sink.write(StepJudged(step=Step(step=step, optimizer=0, world=3, rows=rows)))
        started = {r: Row(rank=r, step=4, step_seconds=9.0 + r, flags=int(Flag.FIRST)) for r in (0, 1)}
        for sink in sinks:  # who started later is not slow
            sink.write(StepJudged(step=Step(step=4, optimizer=0, world=3, rows=started)))
        costs = [samples(sink)["ddpdebug_straggler_cost_seconds_total", str(i)] for i, sink in enumerate(sinks)]
        assert costs == pytest.approx([0.1, 0.2 + 0.2])
    finally:
        for sink in sinks:
            sink.close()


def test_every_series_names_its_run(sink: PrometheusSink) -> None:
    """One value of each per process; where nobody gave a name the id stands for it."""
    for name, shown in (("train", "train"), ("", "r1")):
        sink.write(replace(STARTED, name=name))
        sink.write(FindingRaised(finding=FINDING))
        sink.write(judged(7))
        families = [*text_string_to_metric_families(scraped(sink))]
        found = {tuple(sample.labels.get(label) for label in IDENTITY) for each in families for sample in each.samples}
        assert found == {("r1", shown)}


def test_a_run_is_ill_while_a_grave_finding_is_current(sink: PrometheusSink) -> None:
    """A warning does not make it so; what shows again and again is over when it no longer does."""
    grave = replace(FINDING, step=7, last_step=7)

    def state(step: int) -> float:
        sink.write(judged(step))
        return samples(sink)["ddpdebug_run_state", "0"]

    sink.write(FindingRaised(finding=replace(grave, code="RANK108", severity=Severity.WARNING)))
    assert state(7) == 1
    sink.write(FindingRaised(finding=grave))
    assert state(1007) == 2
    assert state(1008) == 1
    sink.write(FindingRaised(finding=replace(grave, last_step=1009, count=2), new=False))
    assert state(1010) == 2
    assert state(3000) == 1
    sink.write(
        FindingRaised(finding=replace(grave, code=next(rule.code for rule in catalog() if issubclass(rule, EventRule))))
    )
    assert state(9000) == 2


def test_a_hang_that_is_over_is_not_current(sink: PrometheusSink) -> None:
    """It is told only once, and its end is told."""
    hang = replace(FINDING, code="HANG501", step=7, evidence={"hang": "0:1"})
    sink.write(FindingRaised(finding=hang))
    assert samples(sink)["ddpdebug_run_state", "0"] == 2
    over = replace(hang, evidence={**hang.evidence, "ended_after_seconds": 21.0})
    sink.write(FindingRaised(finding=over, new=False))
    assert samples(sink)["ddpdebug_run_state", "0"] == 1


def _waits(sink: PrometheusSink) -> dict[tuple[str, ...], float]:
    """Return the series about waiting: name, rank, and the missing rank with its place."""
    made = {}
    for family in text_string_to_metric_families(scraped(sink)):
        for sample in family.samples:
            if "hang" in sample.name or "waiting" in sample.name or "missing" in sample.name:
                names = [label for label in ("rank", "missing", "phase", "location") if label in sample.labels]
                made[sample.name.removeprefix("ddpdebug_"), *(sample.labels[name] for name in names)] = sample.value
    return made


def test_who_waits_and_who_is_missing_shows_while_it_lasts(sink: PrometheusSink) -> None:
    """In a state with a code, 0 and gone again when it is over."""
    quiet = {("hang_state", "0"): 0.0, ("waiting_seconds", "0"): 0.0}
    assert _waits(sink) == quiet
    stuck = Waiting(state=WaitState.STUCK, ranks=(1, 3), phase="data", location="train.py:33", seconds={0: 9.5, 2: 8.0})
    sink.write(stuck)
    assert _waits(sink) == {
        ("hang_state", "0"): 3.0,
        ("missing_rank", "0", "1", "data", "train.py:33"): 3.0,
        ("missing_rank", "0", "3", "data", "train.py:33"): 3.0,
        ("waiting_seconds", "0"): 9.5,
    }
    sink.write(Waiting())
    assert _waits(sink) == quiet


def test_what_was_told_of_waiting_long_ago_is_not_believed() -> None:
    """A thread that does not come round any more says nothing of now."""
    now = [0.0]
    sink = PrometheusSink(0, clock=lambda: now[0])
    sink.write(Waiting(state=WaitState.AT_WORK, ranks=(1,), seconds={0: 15.0}))
    found = []
    for now[0] in (29.0, 31.0):
        found.append((_waits(sink)["hang_state", "0"], _waits(sink)["waiting_seconds", "0"]))
    sink.close()
    assert found == [(1.0, 15.0), (0.0, 0.0)]


def test_a_rank_that_cannot_tell_the_others_tells_it_itself() -> None:
    """Otherwise the lowest and the highest do, as with findings; each rank says how long it waits itself."""
    sinks = [PrometheusSink(rank, clock=lambda: 5.0) for rank in range(3)]
    for rank, sink in enumerate(sinks):
        sink.write(Met(members=(0, 1, 2)))
        sink.write(Waiting(state=WaitState.SILENT, ranks=(2,), seconds={rank: 6.0}))
    told = [[("hang_state", str(rank)) in _waits(sink) for rank, sink in enumerate(sinks)]]
    sinks[1].write(Waiting(state=WaitState.SILENT, ranks=(0,), seconds={1: 6.0}, alone=True))
    told.append([("hang_state", str(rank)) in _waits(sink) for rank, sink in enumerate(sinks)])
    assert [_waits(sink)["waiting_seconds", str(rank)] for rank, sink in enumerate(sinks)] == [6.0] * 3
    for sink in sinks:
        sink.close()
    assert told == [[True, False, True], [True, True, True]]


def test_of_a_large_world_the_missing_rank_is_shown() -> None:
    """With the aggregates of how long the others wait."""
    sink = PrometheusSink(0, mode="rank0", clock=lambda: 5.0)
    sink.write(replace(STARTED, world=200))
    rows = {rank: Row(rank=rank, step=1) for rank in range(200)}
    sink.write(StepJudged(step=Step(step=1, optimizer=0, world=200, rows=rows)))
    sink.write(Waiting(state=WaitState.STUCK, ranks=(137,), seconds={rank: 9.0 for rank in range(200) if rank != 137}))
    found = samples(sink)
    sink.close()
    assert found["ddpdebug_step", "137"] == 1
    assert found["ddpdebug_waiting_seconds", "137"] == 0
    values = {key[1]: value for key, value in found.items() if key[0] == "ddpdebug_all_ranks_waiting_seconds"}
    assert (values["min"], values["p50"], values["max"]) == (0.0, 9.0, 9.0)
    assert [value for key, value in found.items() if key[0] == "ddpdebug_missing_rank" and "137" in key] == [3.0]


def test_events_are_counted_per_rank_and_exist_before_the_first(sink: PrometheusSink) -> None:
    """An increase over time then sees the first one too."""
    names = ["skipped_steps", "clipped_steps", "unsynchronised_steps", "checked_steps", "steps"]
    before = samples(sink)
    assert {before[f"ddpdebug_{name}_total", "0"] for name in names} == {0}
    assert before["ddpdebug_nonfinite_steps_total", "0", "local_gradients"] == 0
    flags = Flag.SKIPPED | Flag.BYPASS | Flag.CHECKED | Flag.LOCAL_GRADS_NONFINITE
    sink.write(judged(0, flags=flags, clip_norm=3.0, clip_max=1.0))
    sink.write(judged(1, clip_norm=0.5, clip_max=1.0))
    found = samples(sink)
    assert [found[f"ddpdebug_{name}_total", "0"] for name in names] == [1, 1, 1, 1, 2]
    assert found["ddpdebug_nonfinite_steps_total", "0", "local_gradients"] == 1
    assert found["ddpdebug_nonfinite_steps_total", "0", "loss"] == 0


def test_the_outvoted_rank_is_marked_on_its_own_series() -> None:
    """Each rank shows its own part, so that a timeline has one row per rank."""
    rows = {rank: Row(rank=rank, params_after_digest=Digest(9 if rank == 2 else 5)) for rank in range(4)}
    step = StepJudged(step=Step(step=0, optimizer=0, world=4, rows=rows))
    for rank in (1, 2):
        sink = PrometheusSink(rank)
        sink.write(step)
        found = samples(sink)
        assert found["ddpdebug_rank_outvoted", str(rank), "parameters"] == (rank == 2)
        assert found["ddpdebug_ranks_disagreeing", str(rank), "parameters"] == 1
        assert found["ddpdebug_disagreements_total", str(rank), "parameters"] == 1
        sink.close()


def test_the_newest_incidents_have_names_and_old_ones_make_room(sink: PrometheusSink) -> None:
    """Names of parameters never add up: five incidents are shown, with what and who."""
    for i in range(9):
        subject = (f"layer.{i}",)
        sink.write(FindingRaised(finding=Finding(code="C", severity=Severity.ERROR, title="", step=i, subject=subject,
                                                 ranks=(0, 1, 2, 5), location="train.py:88", id=f"C-{i}")))  # fmt: skip
    found = {key: value for key, value in samples(sink).items() if key[0] == "ddpdebug_incident_step"}
    assert list(found.values()) == [4, 5, 6, 7, 8]
    assert ("ddpdebug_incident_step", "C", "0-2,5", "C-8", "train.py:88", "0", "error", "layer.8") in found


def full_of_everything(rank: int, mode: str = "per-rank", world: int = 4) -> PrometheusSink:
    """Make a sink that has seen all that there is, every code of the catalogue found."""
    sink = PrometheusSink(rank, mode=mode)
    sink.write(replace(STARTED, rank=rank, world=world))
    place = {"node": "n", "local_rank": 0, "metrics": "http://127.0.0.1:1/metrics"}
    for each in range(world):
        sink.write(Saved(kind="fact", payload={"rank": each, "topic": "place", "value": place}))
    rows = {r: Row(rank=r, step=1, loss=0.5, step_seconds=0.1) for r in range(world)}
    sink.write(StepJudged(step=Step(step=1, optimizer=0, world=world, rows=rows)))
    table = {f"w{i}": {"norm": 1.0, "update": 0.1, "grad_norm": 0.1, "dim": 2} for i in range(9)}
    seen = {f"m{i}": {"zero_units": 0.1, "saturated": 0.1} for i in range(9)}
    value = {"modules": seen, "parameters": table}
    sink.write(Saved(kind="detail", payload={"rank": rank, "detail": "layers", "value": value}))
    sink.write(Waiting(state=WaitState.STUCK, ranks=tuple(range(1, 9)), location="train.py:33", seconds={rank: 9.0}))
    for i, page in enumerate(pages().values()):
        sink.write(FindingRaised(finding=Finding(code=page.code, severity=page.severity, title="", step=i, id=str(i))))
    return sink


@pytest.mark.smoke
@pytest.mark.parametrize("world", [2, 1024])
def test_the_text_is_what_the_library_would_write(world: int) -> None:
    """Byte for byte, in both formats, odd texts, numbers and label values included."""
    sink = full_of_everything(0, "rank0", world)
    subject = ('a\\b"c\nd\u00e9',)
    sink.write(FindingRaised(finding=Finding(code="C", severity=Severity.INFO, title="", subject=subject, id='"\\')))
    for step, value in enumerate((math.inf, -math.inf, 1e300, 123456789.0, 1e6, 999999.5, 1e-7, -0.0, -2.5)):
        sink.write(
            judged(step + 2, loss=value, grad_norm=value, host_bytes=int(min(abs(value), 2**60)), flags=Flag.CHECKED)
        )
        families = list(sink.collect())
        odd = GaugeMetricFamily("ddpdebug_odd", 'what is "odd", \\ and\nmore', labels=("a",))
        odd.add_metric(['"\\\n'], value)
        frozen = Frozen([*families, odd])
        text = text_of(frozen.collect())
        assert text == generate_latest(frozen)
        assert openmetrics_of(text) == generate_openmetrics(frozen)
    sink.close()


class Frozen(Collector):
    """Families as a registry gives them."""

    def __init__(self, families: list[Metric]) -> None:
        self.families = families

    def collect(self) -> list[Metric]:
        return self.families


def test_the_number_of_series_is_bounded_and_does_not_grow() -> None:
    """Whatever has been found."""
    for rank in (0, 1):
        sink = full_of_everything(rank)
        for step in range(2, 30):
            sink.write(judged(step, loss=1.0, step_seconds=0.1, device_limit_bytes=80))
        count = len(samples(sink))
        for step in range(30, 80):
            sink.write(judged(step, loss=1.0, step_seconds=0.1 * step, device_limit_bytes=80))
        assert len(samples(sink)) == count <= SERIES_WITH_FINDINGS, count
        assert samples(sink)["ddpdebug_findings_total", "other", str(rank), "error"] > 1
        sink.close()


def test_rank_0_lists_all_ranks_for_service_discovery() -> None:
    """As they announced themselves; their series name the run."""
    sink = PrometheusSink(0)
    sink.serve()
    sink.write(replace(STARTED, metrics_url=sink.url))
    value = {"node": "n2", "local_rank": 0, "metrics": "https://n2:9400/metrics"}
    sink.write(Saved(kind="fact", payload={"kind": "fact", "rank": 1, "topic": "place", "value": value}))
    sink.write(Saved(kind="fact", payload={"rank": 1, "topic": "place", "value": {"gpu_uuid": "GPU-1"}}))
    sink.write(Saved(kind="fact", payload={"rank": "x", "topic": "place", "value": 3}))
    with urllib.request.urlopen(sink.url.replace("/metrics", "/sd"), timeout=60) as answer:
        assert answer.headers["Content-Type"] == "application/json"
        listed = json.load(answer)
    own = sink.url.split("/")[2]
    assert listed == [
        {"targets": [own], "labels": {}},
        {"targets": ["n2:9400"], "labels": {"__scheme__": "https"}},
    ]
    sink.close()


def test_the_gpu_and_the_node_of_every_rank_are_known_to_rank_0() -> None:
    """In the mode in which it speaks for all."""
    sink = PrometheusSink(0, mode="rank0")
    sink.write(STARTED)
    for value in ({"node": "n2", "local_rank": 3, "metrics": None}, {"gpu_uuid": "GPU-7"}):
        sink.write(Saved(kind="fact", payload={"rank": 3, "topic": "place", "value": value}))
    assert samples(sink)["ddpdebug_rank_info", "GPU-7", "3", "n2", "3"] == 1
    sink.close()


def test_a_rank_that_left_is_down_where_rank_0_speaks_for_it() -> None:
    """Its last values stay, so that they can be read."""
    sink = PrometheusSink(0, mode="rank0")
    sink.write(judged(0))
    alone = Step(step=1, optimizer=0, world=2, rows={0: Row(rank=0, step=1)})
    sink.write(StepJudged(step=alone))
    found = samples(sink)
    assert (found["ddpdebug_rank_up", "0"], found["ddpdebug_rank_up", "1"], found["ddpdebug_step", "1"]) == (1, 0, 0)
    sink.close()


def test_only_the_own_rank_is_served_in_the_mode_per_rank(sink: PrometheusSink) -> None:
    """The other rank serves itself."""
    sink.write(judged(0))
    assert ("ddpdebug_step", "1") not in samples(sink)


def test_rank_0_serves_all_ranks_in_the_mode_rank0() -> None:
    """By the same series."""
    sink = PrometheusSink(0, mode="rank0")
    sink.write(judged(3))
    found = samples(sink)
    assert (found["ddpdebug_step", "0"], found["ddpdebug_step", "1"]) == (3, 3)


def test_findings_and_failures_are_counted(sink: PrometheusSink) -> None:
    """A finding once per cause; a code appears with its first."""
    sink.write(FindingRaised(finding=FINDING))
    sink.write(FindingRaised(finding=FINDING, new=False))
    sink.write(FindingRaised(finding=Finding(code="NEW1", severity=Severity.INFO, title="t", id="NEW1-1")))
    sink.write(Trouble(part="probe:loss", message="broken"))
    found = samples(sink)
    assert found["ddpdebug_findings_total", "RANK101", "0", "critical"] == 1
    assert found["ddpdebug_findings_total", "NEW1", "0", "info"] == 1
    assert found["ddpdebug_internal_errors_total", "0"] == 1


def test_disagreement_stays_until_the_next_comparison(sink: PrometheusSink) -> None:
    """Steps without a comparison say nothing; optimizers are remembered apart."""
    key = ("ddpdebug_ranks_disagreeing", "0", "parameters")
    assert samples(sink)[key] == 0
    rows = {rank: Row(rank=rank, optimizer=1, params_after_digest=Digest(rank + 1)) for rank in (0, 1)}
    sink.write(StepJudged(step=Step(step=0, optimizer=1, world=2, rows=rows)))
    for step in (judged(0), judged(1, optimizer=1), judged(1, params_after_digest=5)):
        sink.write(step)
        assert samples(sink)[key] == 2
    sink.write(judged(2, optimizer=1, params_after_digest=5))
    assert samples(sink)[key] == 0


def test_values_that_a_step_did_not_compute_stay(sink: PrometheusSink) -> None:
    """A norm of every fifth step is a line, not dots; a loss that is NaN is NaN."""
    sink.write(judged(0, grad_norm=3.0, loss=1.0, flags=Flag.CHECKED))
    sink.write(judged(1, loss=0.5))
    found = samples(sink)
    assert (found["ddpdebug_grad_norm", "0"], found["ddpdebug_loss", "0"]) == (3, 0.5)
    sink.write(judged(2, flags=Flag.LOSS_NONFINITE))
    assert math.isnan(samples(sink)["ddpdebug_loss", "0"])


def test_the_norms_of_weights_end_with_them(sink: PrometheusSink) -> None:
    """They are known rarely, and stay meanwhile; weights that are NaN have none."""
    sink.write(judged(0, param_norm=3.0, update_norm=1.0, val_loss=2.0, flags=Flag.CHECKED))
    sink.write(judged(1, flags=Flag.CHECKED))
    names = [("ddpdebug_param_norm", "0"), ("ddpdebug_update_norm", "0"), ("ddpdebug_val_loss", "0")]
    found = samples(sink)
    assert [found[name] for name in names] == [3, 1, 2]
    sink.write(judged(2, flags=Flag.CHECKED | Flag.PARAMS_NONFINITE))
    found = samples(sink)
    assert [math.isnan(found[name]) for name in names] == [True, True, False]


def test_the_optimizer_that_steps_most_is_followed(sink: PrometheusSink) -> None:
    """The two of a GAN do not take turns in one gauge."""
    for step in range(3):
        sink.write(judged(step, loss=1.0))
        sink.write(judged(step, optimizer=1, loss=9.0))
        assert samples(sink)["ddpdebug_loss", "0"] == 1
    for step in range(3, 6):
        sink.write(judged(step, optimizer=1, loss=9.0))
    assert samples(sink)["ddpdebug_loss", "0"] == 9


def test_it_stops_and_leaves_no_thread() -> None:
    """At the end of the run; closing again does nothing."""
    before = set(background.names())
    sink = PrometheusSink(0)
    sink.serve()
    assert sink._endpoint is not None
    listener = sink._endpoint._server.socket
    sink.write(RunEnded(reason="finished", exit_code=0, steps={}))
    assert until(lambda: not set(background.names()) - before)
    sink.close()
    assert listener.fileno() == -1  # closed: somebody else may have its port by now


def test_promtool_finds_nothing_to_complain_about(need: Callable[[str], str]) -> None:
    """Names, types and help texts follow Prometheus's conventions."""
    sink = full_of_everything(0, "rank0")
    words = [need("promtool"), "check", "metrics"]
    result = subprocess.run(words, input=scraped(sink), capture_output=True, text=True, check=False)
    sink.close()
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_layers_that_stand_out_have_fixed_slots() -> None:
    """The two largest of each kind; a bias, what is not known and what another rank says do not count."""
    sink = PrometheusSink(0)
    weights = {f"w{i}": {"norm": 2.0, "update": 0.1 * i, "grad_norm": None, "dim": 2} for i in range(4)}
    weights["bias"] = {"norm": 0.1, "update": 9.0, "grad_norm": 9.0, "dim": 1}
    modules = {"relu": {"zero_units": 0.25}, "gate": {"saturated": 0.5}, "odd": {"saturated": "x"}}
    detail = {"detail": "layers", "value": {"modules": modules, "parameters": weights}}
    sink.write(Saved(kind="detail", payload={"rank": 0, **detail}))
    sink.write(Saved(kind="detail", payload={"rank": 1, "detail": "layers", "value": {"modules": {"x": 1}}}))
    sink.write(Saved(kind="detail", payload={"rank": 0, "detail": "layers", "value": {}}))
    found = {key: value for key, value in samples(sink).items() if key[0].startswith("ddpdebug_layer_")}
    sink.close()
    assert found == {
        ("ddpdebug_layer_update_ratio", "w3", "0", "1"): pytest.approx(0.15),
        ("ddpdebug_layer_update_ratio", "w2", "0", "2"): pytest.approx(0.1),
        ("ddpdebug_layer_dead_units", "relu", "0", "1"): 0.25,
        ("ddpdebug_layer_saturation", "gate", "0", "1"): 0.5,
    }


def layers(**ratios: float) -> dict[str, object]:
    """Build a sample of weights with these changes over their norms."""
    return {"parameters": {name: {"norm": 1.0, "update": ratio, "dim": 2} for name, ratio in ratios.items()}}


def shown(found: Layers) -> dict[tuple[str, str], float]:
    """Return slot and layer -> value."""
    (family,) = (metric for metric in found.metrics("0", None, 1) if metric.name == "ddpdebug_layer_update_ratio")
    return {(sample.labels["slot"], sample.labels["layer"]): sample.value for sample in family.samples}


def test_a_layer_keeps_its_slot_while_it_stands_out() -> None:
    """Two that are alike do not take turns; a larger one takes the place of the lesser."""
    found = Layers()
    found.take(layers(a=0.5, b=0.4, c=0.3), 0, 1)
    found.take(layers(a=0.40, b=0.41, c=0.45), 0, 1)
    assert shown(found) == {("1", "a"): 0.4, ("2", "b"): 0.41}
    found.take(layers(a=0.40, b=0.41, c=0.6), 0, 1)
    assert shown(found) == {("1", "c"): 0.6, ("2", "b"): 0.41}
    found.take(layers(b=0.1, d=0.2), 0, 1)
    assert shown(found) == {("1", "d"): 0.2, ("2", "b"): 0.1}
    found.take(layers(b=0.1), 0, 1)
    assert shown(found) == {("1", "b"): 0.1}


def test_names_of_layers_do_not_add_up() -> None:
    """However long a run is and however large its model."""
    found, ever = Layers(), set()
    for sample in range(200):
        found.take(layers(**{f"w{sample + i}": 0.1 * 2**i for i in range(3)}), 0, 1)
        ever |= shown(found).keys()
        assert len(shown(found)) == SLOTS
    assert len(ever) == LAYER_NAMES + SLOTS
    assert {layer for _, layer in shown(found)} == {OTHER}


def test_an_answer_says_when_its_values_were_taken() -> None:
    """By the clock of the one that serves."""
    now = [1000.0]
    sink = PrometheusSink(0, clock=lambda: now[0])
    assert samples(sink)["ddpdebug_render_timestamp_seconds", "0"] == 1000
    now[0] = 1001.0
    assert samples(sink)["ddpdebug_render_timestamp_seconds", "0"] == 1001


_COUNTS = """
import json, sys, urllib.request
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
layers = nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
rank = dist.get_rank()
url = json.loads((Path(sys.argv[1]) / "ranks" / str(rank) / "place.json").read_text())["metrics_url"]
torch.manual_seed(rank)
counts = []
for step in range(40):
    loss = model(torch.randn(64, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (0, 39):
        dist.barrier()
        text = urllib.request.urlopen(url, timeout=60).read().decode()
        counts.append([line for line in text.splitlines() if not line.startswith("#")])
with open(Path(sys.argv[1]) / f"counts-{rank}", "w") as file:
    json.dump(counts, file)
dist.destroy_process_group()
"""


@pytest.mark.jobs
@pytest.mark.slow
def test_a_real_rank_has_as_many_series_as_the_page_says(tmp_path: Path) -> None:
    """Before anything is found: no more, and not far fewer; the page has the number from here, once."""
    (tmp_path / "train.py").write_text(_COUNTS)
    run = tmp_path / "run"
    words = [sys.executable, "-m", "ddpdebug", "run", "--nproc-per-node", "2", "--every-step", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, "--out", str(run), str(tmp_path / "train.py"), str(run)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        _, series = json.loads((run / f"counts-{rank}").read_text())
        found = [line for line in series if line.startswith(("ddpdebug_findings_total", "ddpdebug_incident"))]
        quiet = [line for line in series if line not in found] + found[: len(Severity)]
        assert SERIES - 20 <= len(quiet) <= SERIES - 5  # those of a device, "\n".join(series)
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert page.count(f"a rank has at most {SERIES} ") == 1


def test_step_times_that_differ_by_a_fifth_are_told_apart() -> None:
    """The buckets lie about the run's usual step, alike on all ranks, and stay where they are."""
    shown = []
    for rank in (0, 1):
        sink = PrometheusSink(rank)
        for step in range(40):
            seconds = {0: 9.0, 30: 0.4}.get(step, 0.48 if step % 2 else 0.58)
            rows = {each: Row(rank=each, step=step, step_seconds=seconds + 0.01 * each) for each in (0, 1)}
            sink.write(StepJudged(step=Step(step=step, optimizer=0, world=2, rows=rows)))
        found = samples(sink)
        totals = {key[1]: value for key, value in found.items() if key[0] == "ddpdebug_step_seconds_bucket"}
        shown.append(sorted(totals, key=float))
        bounds = [float(bound) for bound in shown[-1]]
        between = [bound for bound in bounds if 0.49 < bound < 0.58]
        assert between
        assert 15 <= totals[str(between[0])] <= 22  # the fast half
        assert found["ddpdebug_step_seconds_count", str(rank)] == totals["+Inf"] == 40
        fine = [bound for bound in bounds if 0.4 < bound < 1.2]
        assert all(after / before < 1.21 for before, after in pairwise(fine))
        sink.close()
    assert shown[0] == shown[1]
    assert len(shown[0]) <= 14


def test_slow_steps_do_not_wait_for_their_buckets_all_day() -> None:
    """A step that takes minutes is known after a few."""
    sink = PrometheusSink(0)
    for step in range(6):
        sink.write(judged(step, step_seconds=90.0))
    assert ("ddpdebug_step_seconds_bucket", "+Inf", "0") in samples(sink)
    sink.close()


def filled(
    *, kind: str = "host", grows: int = 16 << 20, steps: int = 100, peers: int = 1
) -> dict[tuple[str, ...], float]:
    """Scrape a rank whose memory has grown by so many bytes in each step of ten seconds."""
    times = iter(range(0, 10 * steps + 10, 10))
    sink = PrometheusSink(0, clock=lambda: float(next(times)))
    for rank in range(2):
        node = {"node": "n" if rank < peers else "m"}
        sink.write(Saved(kind="fact", payload={"rank": rank, "topic": "place", "value": node}))
    for step in range(steps):
        used, limit = (1 << 30) + grows * step, (1 << 30) + grows * (steps + 99)
        device = kind == "device"
        sizes = {"device_allocated_bytes": used, "device_peak_bytes": used, "device_limit_bytes": limit}
        fields = sizes if device else {"host_bytes": used, "host_limit_bytes": limit}
        sink.write(judged(step, **fields))
    found = samples(sink)
    sink.close()
    return found


@pytest.mark.parametrize("kind", ["host", "device"])
def test_memory_that_grows_says_when_it_is_full(kind: str) -> None:
    """At the present growth; the last step left room for a hundred more of ten seconds each."""
    assert filled(kind=kind)["ddpdebug_memory_full_seconds", kind, "0"] == pytest.approx(1000, rel=0.05)


def test_the_ranks_of_a_node_fill_its_memory_together() -> None:
    """Two that grow alike have left half of the time, or none any more."""
    alone = filled(peers=1)["ddpdebug_memory_full_seconds", "host", "0"]
    both = filled(peers=2)["ddpdebug_memory_full_seconds", "host", "0"]
    assert both < 0.5 * alone


def test_memory_that_does_not_grow_is_never_full() -> None:
    """No forecast at all, and none of a device that is not there."""
    found = filled(grows=0)
    absent = {"ddpdebug_memory_full_seconds", "ddpdebug_allocation_retries_total", "ddpdebug_device_memory_bytes",
              "ddpdebug_device_memory_limit_bytes"}  # fmt: skip
    assert not absent & {key[0] for key in found}
    assert found["ddpdebug_host_memory_limit_bytes", "0"] > 0


def test_a_device_has_its_memory_limit_and_retries() -> None:
    """Retries are counted."""
    sink = PrometheusSink(0)
    sink.write(judged(0, device_limit_bytes=80, device_retries=3))
    found = samples(sink)
    sink.close()
    assert (found["ddpdebug_allocation_retries_total", "0"], found["ddpdebug_device_memory_limit_bytes", "0"]) == (
        3,
        80,
    )


def test_what_all_ranks_know_is_told_by_the_lowest_and_the_highest() -> None:
    """By all where they have not met, are lost to each other, or have been silent for long."""
    now = [0.0]
    told: list[list[bool]] = []
    sinks = [PrometheusSink(rank, clock=lambda: now[0]) for rank in range(4)]

    def look() -> None:
        told.append([("ddpdebug_steps_apart", str(rank)) in samples(sink) for rank, sink in enumerate(sinks)])

    look()
    for members in ((0, 1, 2, 3), (1, 2), ()):
        for sink in sinks:
            sink.write(Met(members=members))
        look()
    for sink in sinks:
        sink.write(Met(members=(0, 1, 2, 3), apart=7))
    assert samples(sinks[0])["ddpdebug_steps_apart", "0"] == 7
    assert ("ddpdebug_step", "1") not in samples(sinks[1])
    assert ("ddpdebug_findings_total", "", "1", "critical") not in samples(sinks[1])
    assert ("ddpdebug_rank_outvoted", "parameters", "1") in {
        (k[0], k[2], k[1]) for k in samples(sinks[1]) if len(k) == 3
    }
    now[0] = 60.0
    look()
    for sink in sinks:
        sink.close()
    everybody = [True] * 4
    assert told == [everybody, [True, False, False, True], [False, True, True, False], everybody, everybody]


def nan_on(rank: int, step: int, code: str = "NUM302", severity: Severity = Severity.CRITICAL) -> FindingRaised:
    """Build a finding about a rank."""
    return FindingRaised(
        finding=Finding(code=code, severity=severity, title="", step=step, ranks=(rank,), id=f"{code}-{step}")
    )


def test_the_rank_that_made_the_first_nan_is_named() -> None:
    """By findings about what was made; later ones, and those about something else, do not count."""
    sink = PrometheusSink(0, mode="rank0")
    sink.write(judged(0))
    sink.write(nan_on(0, 3, "NUM307"))
    sink.write(nan_on(0, 4, "NUM301", Severity.INFO))
    assert samples(sink)["ddpdebug_nonfinite_origin", "0"] == 0
    sink.write(nan_on(0, 9))
    sink.write(nan_on(1, 7))
    sink.write(nan_on(0, 8))
    found = samples(sink)
    sink.close()
    assert (found["ddpdebug_nonfinite_origin", "0"], found["ddpdebug_nonfinite_origin", "1"]) == (0, 1)


def test_layers_end_with_a_nan_and_with_age() -> None:
    """A line that stands is not a layer that trains; the next finite sample shows again."""
    sink = PrometheusSink(0)
    table = {"w": {"norm": 1.0, "update": 0.5, "grad_norm": 2.0, "dim": 2}}
    gone = {"w": {"norm": None, "update": None, "grad_norm": None, "dim": 2}}

    def shown(step: int, parameters: object = None, **fields: float) -> list[str]:
        if parameters is not None:
            payload = {"rank": 0, "step": step, "detail": "layers", "value": {"parameters": parameters}}
            sink.write(Saved(kind="detail", payload=payload))
        sink.write(judged(step, **fields))
        return [key[0] for key in samples(sink) if key[0].startswith("ddpdebug_layer_")]

    both = ["ddpdebug_layer_update_ratio", "ddpdebug_layer_grad_norm"]
    assert shown(0, table) == both
    assert shown(1, flags=Flag.SKIPPED | Flag.GRADS_NONFINITE) == both  # what a loss scaler does
    assert shown(2, flags=Flag.PARAMS_NONFINITE) == []
    assert shown(3) == both
    assert shown(4, gone) == []
    assert shown(5, table) == both
    assert shown(5000) == []  # checked every fifth step: samples come at least every 320
    sink.close()
