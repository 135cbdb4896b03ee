"""The rules about speed, with literals beyond their own examples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from rule_examples import judge

from ddpdebug.detectors.slow.slow601_straggler import Straggler
from ddpdebug.detectors.slow.slow602_input_bound import InputBound
from ddpdebug.detectors.slow.slow603_slowdown_over_time import SlowdownOverTime
from ddpdebug.detectors.slow.timing import job, timing_of
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.schema.announcements import AwaitedLoader, Loader
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.likeliest import likeliest_first, untagged
from ddpdebug.schema.pace import PHASES, behind, costs, own_times
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.step import Step


def told(
    steps: tuple[Step, ...], *rules: type, loaders: tuple[Loader, ...] = (), awaited: int | None = None
) -> list[Finding]:
    """Return the findings as they are at the end of a run."""
    diagnosis = Diagnosis(world=steps[0].world, detectors=[rule() for rule in rules or (Straggler,)])
    for number, loader in enumerate(loaders):
        diagnosis.tell(f"loader:{number}", 0, loader)
    if awaited is not None:
        diagnosis.tell("awaited", 0, AwaitedLoader(loader=awaited))
    found: dict[str | None, Finding] = {}
    for step in steps:
        diagnosis.feed(step)
        found |= {finding.id: finding for finding, _ in diagnosis.tick()}
    return list((found | {finding.id: finding for finding, _ in diagnosis.finish()}).values())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("world", [2, 4])
def test_rank_phase_and_cost_of_a_slow_rank(world: int, phase: str) -> None:
    """What it costs is the sum of the what-if costs, and its share that of the step."""
    steps = job(200, world=world, more=lambda step, rank, p: 0.02 * (rank == 1 and p == phase and step >= 60))
    (finding,) = told(steps)
    assert (finding.ranks, finding.phase) == ((1,), phase)
    assert finding.step == pytest.approx(60, abs=2)
    counted = [costs(own_times(step)) for step in steps[8:]]
    assert finding.evidence["cost_seconds"] == pytest.approx(math.fsum(one[1] for one in counted), rel=0.03)
    assert finding.evidence["share"] == pytest.approx(0.2, abs=0.06)
    assert finding.evidence["behind_seconds"] == pytest.approx(0.02, abs=0.003)


def test_times_are_those_of_the_rows() -> None:
    """The rules compute for all ranks at once what the rows say of each."""
    for step in job(4, noise=0.3)[1:]:
        timing = timing_of(step)
        assert timing is not None
        own = own_times(step)
        assert list(timing.times["own"]) == pytest.approx(list(own.values()))
        assert list(timing.times["wait"]) == pytest.approx([row.wait_seconds for row in step.rows.values()])
        late = [timing.behind_in("own", place) for place in range(4)]
        assert late == pytest.approx(list(behind(own).values()))
        assert timing.cost() == pytest.approx(max(costs(own).values()))
        for phase in PHASES:
            assert list(timing.times[phase]) == pytest.approx([row.own_phases[phase] for row in step.rows.values()])


def test_the_ranks_of_a_slow_node_are_named_together() -> None:
    """Each of them is the last one now and then; half of the ranks are no exception."""
    for slow, named in (({2, 3}, [(2, 3)]), ({0, 1, 2, 3, 4}, [])):
        steps = job(160, world=8, more=lambda step, rank, p, s=slow: 0.02 * (rank in s and p == "backward"))
        assert [finding.ranks for finding in told(steps)] == named


@pytest.mark.parametrize("flag", [Flag.IN_JOIN, Flag.LOCAL_ONLY])
def test_ranks_that_need_not_go_together_are_not_compared(flag: Flag) -> None:
    """They do not wait for each other in each step."""
    fields = {"flags": int(flag)}
    steps = job(160, more=lambda step, rank, p: 0.03 * (rank == 1 and p == "forward"), fields=lambda *_: fields)
    assert told(steps) == []


def test_an_owner_of_a_larger_shard_is_not_slow() -> None:
    """With a sharded optimizer state the optimizer's time is a rank's own on purpose."""

    def sharded(phase: str) -> tuple[Step, ...]:
        fields = {"flags": int(Flag.SHARDED_STATE)}
        return job(160, more=lambda step, rank, p: 0.03 * (rank == 1 and p == phase), fields=lambda *_: fields)

    assert told(sharded("optimizer")) == []
    assert [finding.phase for finding in told(sharded("forward"))] == ["forward"]


@pytest.mark.smoke
def test_short_steps_are_added_up() -> None:
    """What steps of 2 ms show in a hundred of them is noise of the scheduler; in 3,000 of them it is not."""
    steps = tuple(
        replace(step, rows={rank: _shortened(row) for rank, row in step.rows.items()})
        for step in job(3000, more=lambda step, rank, p: 0.02 * (rank == 3 and p == "data"))
    )
    assert judge(Straggler, steps[:500]) == []
    assert {finding.ranks for finding in judge(Straggler, steps)} == {(3,)}


def _shortened(row):
    names = [name for name in row._fields if name.endswith("_seconds")]
    return row._replace(**{name: 0.03 * getattr(row, name) for name in names})


def test_a_collector_that_takes_the_time_is_named() -> None:
    """Also where it runs in each step."""
    steps = job(
        160,
        more=lambda step, rank, p: 0.02 * (rank == 0 and p == "forward"),
        fields=lambda step, rank: {"gc_seconds": 0.019 * (rank == 0)},
    )
    (finding,) = told(steps)
    assert finding.evidence["gc_seconds"] == pytest.approx(0.019)


def test_a_rhythm_survives_a_pause_by_chance() -> None:
    """One of them between the others; pauses without a rhythm are nobody's."""

    def pausing(at: set[int]) -> list[Finding]:
        return told(job(300, more=lambda step, rank, p: 0.4 * (rank == 0 and p == "other" and step in at)))

    (finding,) = pausing({*range(20, 300, 20), 170})
    assert (finding.phase, finding.severity, finding.ranks) == ("pauses", Severity.WARNING, (0,))
    assert finding.evidence["every_steps"] == 20
    assert finding.evidence["pause_seconds"] == pytest.approx(0.4, abs=0.02)
    assert pausing({20, 33, 71, 90, 128, 140, 181, 188, 230, 290}) == []


def test_more_elements_that_do_not_explain_a_delay_are_no_excuse() -> None:
    """A rank with a tenth more elements is not slow by half a step for them."""
    steps = job(
        160,
        more=lambda step, rank, p: 0.04 * (rank == 2 and p == "forward"),
        fields=lambda step, rank: {"batch_elements": 1000 + 100 * (rank == 2)},
    )
    assert [(finding.phase, finding.severity) for finding in told(steps)] == [("forward", Severity.WARNING)]


@pytest.mark.parametrize(
    "loader, word",
    [
        (Loader(workers=0, location="train.py:9"), "num_workers is 0"),
        (Loader(workers=2, location="train.py:9"), "the 2 workers do not keep up"),
        (Loader(workers=2, persistent=False, iterations=3, location="train.py:9"), "persistent_workers=True"),
    ],
)
def test_how_the_loader_is_set_up_says_what_helps(loader: Loader, word: str) -> None:
    """Its line is the finding's."""
    steps = job(120, world=2, more=lambda step, rank, p: 0.03 * (p == "data"))
    (finding,) = told(steps, InputBound, loaders=(loader, Loader(workers=7)))
    assert finding.location == "train.py:9"
    assert finding.evidence["loader"]["workers"] == loader.workers
    assert any(text.startswith(word) for text in finding.evidence["helps"])


def test_the_loader_that_is_waited_for_is_named() -> None:
    """Not that of an evaluation before training; and whether a cache may be filled by its first pass."""
    steps = job(120, world=2, more=lambda step, rank, p: 0.03 * (p == "data"))
    loaders = Loader(workers=7, iterations=2), Loader(workers=1, location="train.py:9", iterations=1)
    (finding,) = told(steps, InputBound, loaders=loaders, awaited=1)
    assert (finding.location, finding.evidence["loader"]["workers"]) == ("train.py:9", 1)
    assert "first_epoch" in finding.evidence
    (finding,) = told(steps, InputBound, loaders=loaders, awaited=0)
    assert finding.evidence["loader"]["workers"] == 7
    assert "first_epoch" not in finding.evidence


def test_one_slow_loader_is_not_everyones() -> None:
    """That rank is a straggler, in its loader."""
    steps = job(160, more=lambda step, rank, p: 0.04 * (rank == 1 and p == "data"))
    assert [(f.code, f.phase) for f in told(steps, InputBound, Straggler)] == [("SLOW601", "data")]


def test_a_slow_rank_is_no_regression() -> None:
    """The pace is that of the median rank, of two that of the faster one."""
    for world in (2, 4):
        steps = job(520, world=world, more=lambda step, rank, p: 0.03 * (rank == 1 and p == "forward" and step > 300))
        assert [finding.code for finding in told(steps, Straggler, SlowdownOverTime)] == ["SLOW601"]


def test_a_regression_says_when_and_by_how_much() -> None:
    """And a machine that is slower is information, told apart from it."""
    steps = job(520, more=lambda step, rank, p: 0.03 * (p == "optimizer" and step >= 300))
    (finding,) = told(steps, SlowdownOverTime)
    assert (finding.phase, finding.severity) == ("optimizer", Severity.WARNING)
    assert finding.step == pytest.approx(300, abs=2)
    assert finding.evidence["ratio"] == pytest.approx(96 / 66, abs=0.03)
    usual = {"data": 0.004, "forward": 0.02, "backward": 0.03, "optimizer": 0.004, "wait": 0.008}
    steps = job(700, more=lambda step, rank, p: 0.4 * usual.get(p, 0.0) * (step >= 300))
    (finding,) = told(steps, SlowdownOverTime)
    assert finding.severity is Severity.INFO
    assert "machine" in finding.evidence
    computing = job(
        700,
        more=lambda step, rank, p: 0.4 * usual.get(p, 0.0) * (step >= 300),
        fields=lambda step, rank: {"cpu_seconds": 0.05 + 0.026 * (step >= 300)},
    )
    assert [finding.severity for finding in told(computing, SlowdownOverTime)] == [Severity.WARNING]


def test_the_evidence_of_an_incident_is_the_newest() -> None:
    """What a rank has cost grows until the end."""
    steps = job(400, more=lambda step, rank, p: 0.02 * (rank == 2 and p == "forward"))
    (early,), (late,) = told(steps[:110]), told(steps)
    assert early.id == late.id
    assert late.evidence["cost_seconds"] > 3 * early.evidence["cost_seconds"]
    assert late.evidence["steps"] == 392


def test_a_spell_that_is_over_is_nobodys_habit() -> None:
    """However much of the windows that are looked at it fills."""
    for first, last in ((8, 41), (100, 148)):
        steps = job(300, more=lambda _, rank, p, a=first, b=last: 0.03 * (rank == 2 and p == "other" and a <= _ < b))
        assert told(steps) == []


def test_what_is_known_of_some_ranks_only_accuses_nobody() -> None:
    """A rank whose waiting is not known may be the slow one."""
    unknown = {"backward_local_seconds": math.nan, "sync_wait_seconds": math.nan}
    assert told(job(200, world=2, fields=lambda _, rank: unknown if rank == 0 else {})) == []


def test_the_cost_of_several_ranks_is_that_of_all_of_them() -> None:
    """The share and the seconds tell the same."""
    steps = job(300, world=8, more=lambda _, rank, p: 0.03 * (rank in {2, 3} and p == "forward"))
    (finding,) = told(steps)
    whole = sum(step.rows[0].step_seconds for step in steps[8:])
    assert finding.ranks == (2, 3)
    assert finding.evidence["cost_seconds"] == pytest.approx(finding.evidence["share"] * whole, rel=0.1)


def in_turn(first: tuple[Step, ...], second: tuple[Step, ...], every: int = 1) -> tuple[Step, ...]:
    """Return the steps of two optimizers, of which the second one steps after so many of the first."""
    found: list[Step] = []
    for number, step in enumerate(first):
        found.append(step)
        if number % every == every - 1:
            other = second[number // every]
            rows = {rank: row._replace(optimizer=1) for rank, row in other.rows.items()}
            found.append(replace(other, optimizer=1, rows=rows))
    return tuple(found)


def longer(steps: tuple[Step, ...], times: float) -> tuple[Step, ...]:
    """Return steps all times of which are so many times as long."""
    names = [name for name in Row._fields if name.endswith("_seconds")]

    def of(row: Row) -> Row:
        return row._replace(**{name: times * getattr(row, name) for name in names})

    return tuple(replace(step, rows={rank: of(row) for rank, row in step.rows.items()}) for step in steps)


@pytest.mark.smoke
def test_the_pace_of_several_optimizers_is_that_of_their_training() -> None:
    """A fifth of a short step is little of an iteration that has a long one as well."""
    usual = longer(job(200), 4)
    for seconds, ranks in ((0.014, []), (0.06, [(2,)])):
        slow = job(200, more=lambda _, rank, p, s=seconds: s * (rank == 2 and p == "forward"))
        assert [finding.ranks for finding in told(slow)] == [(2,)]
        assert [finding.ranks for finding in told(in_turn(slow, usual))] == ranks
    (finding,) = told(in_turn(slow, usual))
    assert finding.evidence["step_seconds"] == pytest.approx(0.066 + 0.06 + 4 * 0.066, rel=0.1)
    assert finding.evidence["share"] == pytest.approx(0.06 / 0.39, abs=0.03)
    waiting = job(200, more=lambda _, rank, p: 0.03 * (p == "data"))
    assert [finding.code for finding in told(waiting, InputBound)] == ["SLOW602"]
    assert told(in_turn(waiting, usual), InputBound) == []


@pytest.mark.parametrize("every", [5, 50])
def test_an_optimizer_that_steps_rarely_belongs_to_an_iteration(every: int) -> None:
    """One that steps after every fifth step of the other is waited for, one that hardly ever does is not."""
    slow = job(400, more=lambda _, rank, p: 0.03 * (rank == 1 and p == "backward"))
    (finding,) = told(in_turn(slow, job(80), every))
    assert (finding.ranks, finding.phase) == ((1,), "backward")
    steps = 1 + 5 * 0.1 / 0.066 if every == 5 else 0.1 / 0.066
    assert finding.evidence["step_seconds"] == pytest.approx(0.066 * steps, rel=0.15)
    assert finding.last_step > 360


def test_optimizers_that_no_longer_step_are_not_waited_for() -> None:
    """However many a script has used one after the other: what is slow in the last one is found in it."""
    stages = [
        replace(step, optimizer=stage)
        for stage in range(12)
        for step in job(120, more=lambda _, rank, p, s=stage: 0.03 * (rank == 2 and p == "forward" and s == 11))
    ]
    (finding,) = told(tuple(replace(step, step=number) for number, step in enumerate(stages)))
    assert finding.ranks == (2,)
    assert finding.step == pytest.approx(11 * 120, abs=40)  # the one before is waited for so long


@pytest.mark.parametrize(
    "later, usual",
    [
        ({"micro_batches": 2}, {"micro_batches": 1}),
        ({"without_grad": 0}, {"without_grad": 40}),
        ({"presence_digest": 9}, {"presence_digest": 7}),
    ],
)
def test_a_step_that_does_something_else_begins_another_pace(later: dict[str, int], usual: dict[str, int]) -> None:
    """Which takes as long as it takes; where it gets longer later, that is a regression again."""

    def begun(at: int) -> tuple[Step, ...]:
        return job(
            800,
            world=2,
            more=lambda step, _, p: 0.02 * (p == "forward" and step >= 270) + 0.03 * (p == "backward" and step >= at),
            fields=lambda step, _: {"batch_elements": 0, **(later if step >= 270 else usual)},
        )

    assert told(begun(900), SlowdownOverTime) == []
    (finding,) = told(begun(620), SlowdownOverTime)
    assert (finding.phase, finding.severity) == ("backward", Severity.WARNING)
    assert finding.step == pytest.approx(620, abs=2)
    assert finding.evidence["before_seconds"] == pytest.approx(0.085, abs=0.003)


def test_layers_that_are_dropped_at_random_hide_no_regression() -> None:
    """What has a gradient differs from step to step, and says nothing."""
    steps = job(
        520,
        world=2,
        more=lambda step, _, p: 0.03 * (p == "forward" and step >= 300),
        fields=lambda step, _: {"without_grad": 3 * step % 7, "presence_digest": (1 + step % 7) * (step % 32 == 0)},
    )
    assert [finding.phase for finding in told(steps, SlowdownOverTime)] == ["forward"]


@pytest.mark.parametrize("every, seconds", [(3, 0.03), (4, 0.04), (6, 0.06)])
def test_less_than_a_step_in_every_few_steps_is_found(every: int, seconds: float) -> None:
    """With its distance and its cost, also where every step is rough."""

    def late(share: float) -> list[Finding]:
        return told(
            job(
                240,
                noise=0.1,
                more=lambda step, rank, p: share * seconds * (rank == 1 and p == "other" and step % every == 1),
            )
        )

    (finding,) = late(1.0)
    assert (finding.ranks, finding.phase, finding.severity) == ((1,), "pauses", Severity.INFO)
    assert finding.evidence["every_steps"] == every
    assert finding.evidence["pause_seconds"] == pytest.approx(seconds, rel=0.3)
    assert finding.evidence["share"] == pytest.approx(seconds / every / (0.07 + seconds / every), abs=0.05)
    assert late(0.3) == []


def test_the_time_that_ddpdebug_takes_is_no_cost_of_a_pause() -> None:
    """However long it looks at the rank whose training pauses."""

    def pausing(own: float) -> Finding:
        steps = job(
            160,
            more=lambda step, rank, p: (0.2 + own) * (rank == 0 and p == "other" and step % 10 == 0),
            fields=lambda step, rank: {"overhead_seconds": 0.001 + own * (rank == 0 and step % 10 == 0)},
        )
        (finding,) = told(steps)
        return finding

    usual, watched = pausing(0.0), pausing(0.2)
    assert watched.phase == usual.phase == "pauses"
    assert watched.evidence["pause_seconds"] == pytest.approx(usual.evidence["pause_seconds"])
    assert watched.evidence["cost_seconds"] == pytest.approx(usual.evidence["cost_seconds"], rel=0.05)


def test_the_phase_of_an_incident_is_the_newest() -> None:
    """As its numbers are, which tell of that phase."""
    steps = job(
        300,
        more=lambda n, rank, p: 0.02 * (rank == 2 and p == ("forward" if n < 120 else "backward")),
        fields=lambda _, rank: {"cpu_seconds": 0.05 + 0.02 * (rank == 2)},
    )
    (early,), (late,) = told(steps[:110]), told(steps)
    assert (early.id, early.phase, late.id, late.phase) == (late.id, "forward", early.id, "backward")


@pytest.mark.parametrize(
    "phase, cause",
    [("data", "slower storage"), ("backward", "work of the script"), ("other", "work for this rank only")],
)
def test_the_causes_of_a_phase_come_first(phase: str, cause: str) -> None:
    """And what it costs is told once, of the ranks that the finding names."""
    (finding,) = told(job(120, world=2, more=lambda _, rank, p: 0.02 * (rank == 1 and p == phase)))
    assert untagged(likeliest_first(finding)[0][0]).startswith(cause)
    assert len(finding.causes) == 6
    assert "rank" not in finding.evidence["cost"]
