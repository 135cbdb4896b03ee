"""What goes from a rank to the process beside it, and is the same there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpdebug.companion.calls import dumped, json_of_record, record_of_json
from ddpdebug.schema.announcements import RankCoverage
from ddpdebug.schema.coverage import Coverage
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.run_state import WaitState
from ddpdebug.schema.step import Step
from ddpdebug.sinks import (
    Covered,
    FindingIgnored,
    FindingRaised,
    Met,
    Record,
    RunEnded,
    RunStarted,
    Saved,
    StepJudged,
    Trouble,
    Waiting,
)
from ddpdebug.sinks.prometheus.exporter import PrometheusSink
from ddpdebug.sinks.prometheus.exposition import text_of

_WORLD = 3


def _step(number: int) -> StepJudged:
    rows = {
        rank: Row(
            rank=rank,
            step=number,
            loss=1.5 / (number + 1),
            grad_norm=float("inf") if number == 4 else 2.0,
            step_seconds=0.1 + 0.01 * rank,
            forward_seconds=0.04,
            host_bytes=1 << 30,
            params_before_digest=number + (rank == 2),
            flags=int(Flag.CHECKED | (Flag.GRADS_NONFINITE if number == 4 else 0)),
        )
        for rank in range(_WORLD)
    }
    step = Step(step=number, optimizer=0, world=_WORLD, rows=rows)
    return StepJudged(step=step, steps=2, interval=4, overhead_ratio=0.02, overhead_of_run=0.01, overhead_seconds=0.5)


_FINDING = Finding(
    code="RANK101", severity=Severity.ERROR, title="t", id="RANK101-1", step=2, ranks=(2,), subject=("net.weight",)
)
_ACCOUNT = RankCoverage(rank=1, steps=6, off={"probe:batches": "ValueError: x"})
_RECORDS: tuple[Record, ...] = (
    RunStarted(
        run_id="r1",
        rank=1,
        world=_WORLD,
        directory=Path("runs/x"),
        config={"budget": 0.01, "out": Path("x")},
        versions={"torch": "2", "ddpdebug": "1"},
        metrics_url="http://127.0.0.1:1/metrics",
        node="n",
        local_rank=1,
        name="train",
    ),
    *(
        Saved(kind="fact", payload={"topic": "place", "rank": r, "value": {"node": "n", "gpu_uuid": "g"}})
        for r in (1, 2)
    ),
    *map(_step, range(30)),
    Saved(
        kind="detail",
        payload={
            "detail": "layers",
            "rank": 1,
            "step": 28,
            "value": {"parameters": {"a": {"update": 0.1, "norm": 2.0, "grad_norm": 3.0, "dim": 2}}},
        },
    ),
    Met(members=(1, 2), apart=1),
    Waiting(state=WaitState.STUCK, ranks=(2,), phase="forward", location="a.py:1", seconds={0: 2.5, 1: 3.0}, line="x"),
    FindingRaised(finding=_FINDING),
    FindingRaised(finding=_FINDING, new=False),
    Trouble(part="exchange", message="x"),
    Covered(coverage=Coverage(world=_WORLD, compared=3, ranks=(_ACCOUNT,), certain=True)),
)


def _read(record: Record) -> Record:
    about = json_of_record(record)
    assert about is not None
    return record_of_json(json.loads(dumped(about)))


@pytest.mark.parametrize("mode", ["per-rank", "rank0"])
def test_the_metrics_are_those_of_the_records_as_they_were(mode: str) -> None:
    """To the letter, of every kind of record, with a step that has infinities in it."""
    texts = []
    for read in (lambda record: record, _read):
        sink = PrometheusSink(1, mode=mode, clock=lambda: 1000.0)
        for record in _RECORDS:
            sink.write(read(record))
        texts.append(text_of(sink.collect()).decode())
    assert texts[0] == texts[1]
    for part in ('rank="1"', "ddpdebug_layer_grad_norm{", 'code="RANK101"', "ddpdebug_hang_state{", 'part="'):
        assert part in texts[0]


def test_a_rank_that_says_nothing_any_more_is_silent() -> None:
    """Its page is served without it; one that others have left has nothing to say."""
    now = [1000.0]
    sink = PrometheusSink(1, clock=lambda: now[0])

    def states() -> list[str]:
        lines = text_of(sink.collect()).decode().splitlines()
        return [line.rpartition(" ")[2] for line in lines if line.startswith("ddpdebug_hang_state{")]

    sink.write(Met(members=(0, 1)))
    assert states() == ["0.0"]
    now[0] += 61
    assert states() == [str(float(WaitState.SILENT))]
    sink.write(Met(members=(1,)))
    now[0] += 61
    assert states() == ["0.0"]


def test_the_end_is_read_as_it_was_said() -> None:
    """And what no metric is made of is not sent."""
    ended = RunEnded(reason="finished", exit_code=0, steps={}, time="t")
    assert _read(ended) == ended
    assert json_of_record(FindingIgnored(_FINDING)) is None
    assert json_of_record(Saved(kind="fact", payload={"topic": "end", "rank": 0})) is None
