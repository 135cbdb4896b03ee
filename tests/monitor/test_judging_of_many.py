"""One rank of very many: whom it waits for, what it does not believe, and how long it judges."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdebug.exchange.partial import Key, Partial, StepPart
from ddpdebug.exchange.step_assembler import LAG_STEPS, LATE_STEPS
from ddpdebug.exchange.ticks import Tick
from ddpdebug.monitor.many_ranks import Calls, ManyRanks, PartAssembler, fault_of_part
from ddpdebug.schema.row import Flag, Row, encode
from ddpdebug.schema.step import Step

_WORLD = 80
_ALL = range(_WORLD)
_EVERYONE = (1 << _WORLD) - 1
_LOCAL = {"step_seconds": 0.01}


def _part(step: int, ranks: range = _ALL, **fields: Any) -> tuple[Key, StepPart]:
    whole = Partial()
    for rank in ranks:
        whole.add_row(encode(Row(rank=rank, step=step, params_after_digest=1, **_LOCAL, **fields)))
    ((key, part),) = whole.steps.items()
    return key, part


class _Rank:
    """A rank of very many, and what it does."""

    def __init__(self, rank: int = 0, seconds: float = 0.0) -> None:
        self.judged: list[Step] = []
        self.said: list[str] = []
        self.told: list[str] = []
        self.shown: list[Step] = []
        self.now = self.used = 0.0
        self.seconds = seconds  # that it takes to judge a step
        calls = Calls(
            say=lambda kind, **_: self.said.append(kind),
            learn=lambda _: None,
            judge=self._judge,
            show=self.shown.append,
            curious=lambda _: (),
            tell=lambda part, message: self.told.append(f"{part}: {message}"),
        )
        self.many = ManyRanks(rank, _WORLD, calls, lambda: self.now, lambda: self.used)

    def _judge(self, step: Step) -> None:
        self.judged.append(step)
        self.used += self.seconds

    def tick(
        self, *parts: tuple[Key, StepPart], members: tuple[int, ...] = tuple(_ALL), last_states: bool = False
    ) -> None:
        self.many.take(Tick((), (), members, 1 << 20, 0, dict(parts)))
        self.many.work(last_states=last_states)


def test_a_rank_that_has_passed_a_step_without_a_row_is_not_waited_for() -> None:
    """Its row was lost; one that has not come so far yet may come, and is waited for."""
    passed, behind = PartAssembler(), PartAssembler()
    for step in range(LAG_STEPS + 1):
        passed.add(*_part(step, range(1, _WORLD) if step == 0 else _ALL))
        behind.add(*_part(step, range(1, _WORLD)))
    assert [key[1] for key, _ in passed.ready(_EVERYONE)] == list(range(LAG_STEPS + 1))
    assert list(behind.ready(_EVERYONE)) == []
    behind.add(*_part(LATE_STEPS, range(1, _WORLD)))
    assert [key[1] for key, _ in behind.ready(_EVERYONE)] == [0]


def test_what_the_last_steps_have_left_is_judged_before_the_ranks_leave() -> None:
    """Also where only some ranks have taken it; nobody could be asked about it afterwards."""
    rank, last = _Rank(), _part(70, range(40), flags=int(Flag.LAST_STATE))
    rank.tick(last)
    assert rank.judged == []
    rank.tick(last_states=True)
    assert [(step.step, len(step.everyone)) for step in rank.judged] == [(70, 40)]


@pytest.mark.parametrize(
    ("key", "row", "members", "says"),
    [
        ((0, 5, False), Row(rank=3, step=5), 1 << 3, None),
        ((0, 5, False), Row(rank=3, step=5), 1 << 3 | 1 << _WORLD, "of rank 80"),
        ((0, 5, False), Row(rank=4, step=5), 1 << 3, "of rank 4"),
        ((0, 5, False), Row(rank=-1, step=5), 1 << 3, "of rank -1"),
        ((0, 4, False), Row(rank=3, step=5), 1 << 3, "of step 5"),
        ((0, 105, False), Row(rank=3, step=105), 1 << 3, "no rank has taken more than 100"),
        ((0, 5, False), Row(rank=3, step=5, flags=1 << 60), 1 << 3, "flags"),
        ((-1, 5, False), Row(rank=3, step=5, optimizer=-1), 1 << 3, "of optimizer -1"),
    ],
)
def test_rows_that_cannot_be_true_are_left_out(key: Key, row: Row, members: int, says: str | None) -> None:
    """One rank with damaged memory must not have all others wait, or judge steps that are not complete."""
    part = StepPart()
    part.add(encode(row), members)
    fault = fault_of_part(key, part, _WORLD, progress=100)
    assert (fault is None) if says is None else (fault is not None and says in fault)
    rank = _Rank()
    rank.many.take(Tick((), (), tuple(_ALL), 100, 0, {key: part}))
    rank.many.take(Tick((), (), tuple(_ALL), 100, 0, {key: part}))
    assert len(rank.told) == (says is not None)


def test_judging_is_bounded_by_the_budget_and_says_so() -> None:
    """Steps that show nothing are left out first, what is told of all is said once, and all else goes on."""
    rank = _Rank(seconds=0.05)
    rank.many.limit(0.01)
    for step in range(100, 600):  # 5 s of training, and 25 s of judging
        rank.now += 0.01
        rank.tick(_part(step, flags=int(Flag.CHECKED) if step % 100 == 0 else 0))
    asked = rank.said.count("rows")
    assert rank.used <= 1.0 + 1.0 + 0.01 * 5 + 0.05 * (2 + asked)  # at once, owed, the share, and the ones begun
    assert {step.step for step in rank.judged if step.any(Flag.CHECKED)} == set(range(100, 600, 100))
    assert rank.many.left_out == 500 - len(rank.judged)
    assert sorted(step.step for step in (*rank.judged, *rank.shown)) == list(range(100, 600))  # none is missing
    (said,) = rank.told
    assert said.startswith("judging: the steps of 80 ranks come faster than the budget lets")
    rank.now += 49.0  # no rows of all ranks are due
    judged = len(rank.judged)
    rank.tick(_part(600), _part(601))
    assert len(rank.judged) == judged + 2


def test_whole_steps_are_bounded_as_well() -> None:
    """Where the rows of all ranks cost as much as a minute's share they are wanted less often."""
    rank = _Rank(seconds=3.0)
    rank.many.limit(0.01)
    rank.many.whole.allowance.spend(4.0)
    for step in range(1000, 1064):  # 640 s: 3.2 s of time for whole steps
        rank.now += 10.0
        rank.tick(_part(step))
    assert rank.said.count("rows") == 1


def test_a_judge_that_has_time_leaves_nothing_out() -> None:
    """Of steps of 250 ms the budget is 2.5 ms."""
    rank = _Rank(seconds=0.0025)
    rank.many.limit(0.01)
    for step in range(100, 600):
        rank.now += 0.25
        rank.tick(_part(step))
        rank.many.whole._parked.clear()  # rows of all would come
    assert (rank.many.left_out, rank.told) == (0, [])


def test_steps_that_could_not_come_any_more_are_nobodys() -> None:
    """Where the ranks have lost each other, those of which rows are on their way are not judged without them."""
    parted = _Rank()
    parted.tick(_part(100), _part(101, range(40)))
    parted.many.rest(complete=True)
    assert [step.step for step in parted.judged] == [100]
    left = _Rank()
    left.tick(_part(100), _part(101, range(40)))
    left.many.rest(complete=False)
    assert [step.step for step in left.judged] == [100, 101]


def _parted(step: int, odd: int) -> tuple[Key, StepPart]:
    whole = Partial()
    for rank in _ALL:
        whole.add_row(encode(Row(rank=rank, step=step, params_after_digest=2 if rank == odd else 1, **_LOCAL)))
    ((key, part),) = whole.steps.items()
    return key, part


def test_a_rank_that_foresees_the_judges_question_does_not_idle() -> None:
    """All hear that the ranks part: whom the judge then asks for its row would hear that a second later."""
    judge, other = _Rank(0), _Rank(9)
    for step in range(100, 130):
        judge.now = other.now = 0.3 * step
        part = _parted if step in {110, 120} else lambda step, odd: _part(step)
        judge.tick(part(step, odd=5))
        other.tick(part(step, odd=5))
        assert other.many.busy == (step in {110, 120})
    assert judge.said == ["rows", "rows"]
    assert other.said == []


def test_ranks_that_part_in_each_step_idle_as_before() -> None:
    """It may be right that they differ, and no rank is hurried more often than the judge asks."""
    other = _Rank(9)
    hurried = 0
    for step in range(100, 400):
        other.now = 0.3 * step
        other.tick(_parted(step, odd=step % _WORLD))
        hurried += other.many.busy
    assert hurried <= 8
