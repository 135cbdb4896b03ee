"""The steps of very many ranks as the judge gets them."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from typing import Any

import pytest

from ddpdebug.exchange.partial import Key, Partial, StepPart
from ddpdebug.monitor.many_ranks import PartAssembler, Rows, WholeSteps, chosen_step
from ddpdebug.schema.row import Flag, Row, encode
from ddpdebug.schema.step import MOST_CHOSEN, step_of

_WORLD = 80
_ALL = (1 << _WORLD) - 1


def _row(rank: int, step: int, odd: int | None = None, **fields: object) -> bytes:
    digest = 2 if rank == odd else 1
    return encode(Row(rank=rank, step=step, params_after_digest=digest, **fields))  # type: ignore[arg-type]


def _part(
    step: int, ranks: range = range(_WORLD), odd: int | None = None, optimizer: int = 0, **own: Callable[[int], object]
) -> tuple[Key, StepPart]:
    whole = Partial()
    for rank in ranks:
        whole.add_row(_row(rank, step, odd, optimizer=optimizer, **{name: of(rank) for name, of in own.items()}))
    ((key, part),) = whole.steps.items()
    return key, part


class _Judge:
    def __init__(self) -> None:
        self.keys: list[tuple[int, int]] = []
        self.now, self.taken = 0.0, 0
        self.rules: list[str] = []  # that ask
        self.whole = WholeSteps(_WORLD, lambda key: self.keys.append(key[:2]), lambda: self.now, lambda _: self.rules)

    @property
    def asked(self) -> list[int]:
        return [step for _, step in self.keys]

    def take(self, step: int, odd: int | None = None, **more: Any) -> None:
        self.taken = step
        key, part = _part(step, odd=odd, **more)
        self.whole.add(key, part, chosen_step(key, part))

    def answer(self, step: int, ranks: range = range(_WORLD), odd: int | None = None) -> None:
        for rank in ranks:
            self.whole.hear(rank, base64.b64encode(_row(rank, step, odd)).decode())


def test_a_step_is_whole_when_all_have_taken_it() -> None:
    """In however many ticks its rows come, and whoever takes it last."""
    assembler = PartAssembler()
    assembler.add(*_part(5, range(30)))
    assembler.add(*_part(6, range(_WORLD)))
    assert [key[1] for key, _ in assembler.ready(_ALL)] == [6]
    assembler.add(*_part(5, range(30, _WORLD)))
    assert list(assembler.ready(_ALL)) == []  # 6 was judged: what comes for a step before it comes too late


def test_steps_are_judged_in_their_order() -> None:
    """Each once, with all ranks in it."""
    assembler = PartAssembler()
    for step in (3, 1, 2):
        assembler.add(*_part(step))
    found = list(assembler.ready(_ALL))
    assert [key[1] for key, _ in found] == [1, 2, 3]
    assert all(part.ranks == _ALL for _, part in found)
    assert list(assembler.ready(_ALL)) == []


def test_who_has_left_is_not_waited_for() -> None:
    """And at the end of the run nobody is."""
    assembler = PartAssembler()
    assembler.add(*_part(1, range(10)))
    assert list(assembler.ready(_ALL)) == []
    assert len(list(assembler.ready((1 << 10) - 1))) == 1
    assembler.add(*_part(2, range(3)))
    assert len(list(assembler.ready(_ALL, everything=True))) == 1


def test_chosen_rows_are_marked() -> None:
    """Ranks of two kinds are parted, whatever their numbers; so is what is read from files."""
    for odd in (None, 7):
        key, part = _part(4, odd=odd)
        step = chosen_step(key, part)
        assert (step.chosen, step.parted, step.world) == (True, odd is not None, _WORLD)
        assert len(step.rows) <= MOST_CHOSEN
        assert step.everyone == set(range(_WORLD))
        assert step.minority("params_after_digest") == (() if odd is None else (odd,))
        assert step.values("params_after_digest")[1] == [rank for rank in range(_WORLD) if rank != odd]
        saved = step_of(0, 4, step.rows, _WORLD)  # what these stand for is lost
        assert (saved.chosen, saved.parted, saved.rows) == (True, odd is not None, step.rows)
    assert not step_of(0, 4, dict.fromkeys(range(_WORLD), Row()), _WORLD).chosen
    assert not step_of(0, 4, {0: Row()}, 64).chosen


@pytest.mark.smoke
def test_all_rows_are_wanted_in_the_first_steps_and_once_a_minute() -> None:
    """Of healthy ranks; everything else is judged at once."""
    judge = _Judge()
    for step in range(200):
        judge.take(step)
        judge.answer(step)
    assert judge.asked == [0, 1, 2, 4, 8, 16, 32]
    steps = list(judge.whole.ready())
    assert [step.step for step in steps] == list(range(200))
    assert [step.step for step in steps if not step.chosen] == judge.asked
    judge.now = 61.0
    judge.take(200)
    judge.take(201)
    assert judge.asked[7:] == [200]


def test_all_rows_are_wanted_where_ranks_begin_to_differ() -> None:
    """Not while they differ as before, and not without end where they differ in another way each time."""
    judge = _Judge()
    for step in range(40, 60):
        judge.take(step, odd=5 if step >= 50 else None)
    assert judge.asked == [50]
    for step in range(60, 100):
        judge.take(step, odd=step % 30)
    assert len(judge.asked) == 4
    for later, asked in ((11.0, 5), (15.0, 5), (10.0, 6), (20.0, 6)):  # after 10 s, and then 20, 40, ...
        judge.now += later
        judge.take(judge.taken + 1, odd=judge.taken % 30)
        assert len(judge.asked) == asked


def test_healthy_ranks_that_differ_leave_credit_for_others() -> None:
    """Ranks that have other gradients in each step, and then one that has other parameters, or what is not finite."""
    judge = _Judge()
    chance = random.Random(2)
    for step in range(40, 400):
        judge.take(step, presence_digest=lambda _: chance.randrange(1, 4))
    assert len(judge.asked) == 4
    judge.take(400, odd=5, presence_digest=lambda _: chance.randrange(1, 4))
    assert judge.asked[4:] == [400]
    for step in range(401, 420):
        judge.take(step, presence_digest=lambda _: chance.randrange(1, 4), flags=lambda _: int(Flag.LOSS_NONFINITE))
    assert judge.asked[5:] == [401, 402, 403, 404]


def test_what_comes_again_after_a_long_time_has_new_credit() -> None:
    """A quarter of an hour of ranks that are alike."""
    judge = _Judge()
    for start in (40.0, 10_000.0):
        judge.now, before = start, len(judge.asked)
        for step in range(int(start), int(start) + 60):
            judge.take(step, odd=step % 30)
        assert len(judge.asked) - before in {4, 5}  # and once because a minute has gone by


def test_what_is_not_finite_on_all_ranks_is_asked_for_in_parted_steps() -> None:
    """The kinds are the same as before, and what they show is not."""
    judge = _Judge()
    for step in range(40, 50):
        judge.take(step, odd=5)
    assert judge.asked == [40]
    judge.take(50, odd=5, flags=lambda _: int(Flag.LOCAL_GRADS_NONFINITE))
    assert judge.asked == [40, 50]


def test_a_rule_that_asks_has_credit_of_its_own() -> None:
    """By what the chosen rows show."""
    judge = _Judge()
    judge.rules = ["DATA901"]
    for step in range(40, 100):
        judge.take(step)
    assert judge.asked == [40, 41, 42, 43]
    judge.rules = ["DATA901", "RANK107"]
    judge.take(100)
    assert judge.asked[4:] == [100]


def test_all_rows_of_each_optimizer_are_wanted() -> None:
    """In the first steps, and once a minute for each, not for all at once."""
    judge = _Judge()
    for step in range(3):
        for optimizer in (0, 1):
            judge.take(step, optimizer=optimizer)
    assert judge.asked == [0, 0, 1, 1, 2, 2]
    for step in range(40, 200):
        judge.now += 1.0
        for optimizer in (0, 1):
            judge.take(step, optimizer=optimizer)
    assert len(judge.asked) == 6 + 4
    assert {optimizer for optimizer, _ in judge.keys} == {0, 1}


def test_later_steps_wait_for_the_rows_of_one_before() -> None:
    """The rules see steps in their order; rows that do not come are not waited for without end."""
    judge = _Judge()
    judge.take(70, odd=3)
    judge.take(71, odd=3)
    assert list(judge.whole.ready()) == []
    judge.answer(70, range(20), odd=3)
    assert list(judge.whole.ready()) == []
    judge.answer(70, range(20, _WORLD), odd=3)
    first, second = judge.whole.ready()
    assert (first.step, first.chosen, len(first.rows)) == (70, False, _WORLD)
    assert (second.step, second.chosen, second.parted) == (71, True, True)
    judge.take(72, odd=9)
    found = [step for _ in range(200) for step in judge.whole.ready()]
    assert [(step.step, step.chosen) for step in found] == [(72, True)]
    assert not judge.whole.waiting


def test_each_optimizer_has_rows_of_its_own() -> None:
    """Many of them, that step inside backward, do not push out each other's newest rows."""
    rows = Rows()
    for step in range(20):
        for optimizer in range(300):
            rows.add(_row(3, step, optimizer=optimizer))
    assert all(len(rows.answer([(optimizer, 19, False), (optimizer, 12, False)])) == 2 for optimizer in range(300))
    assert {len(ring) for ring in rows.kept.values()} == {8}
    assert rows.own((7, 19, False)).keys() == {3}
    assert rows.own((300, 19, False)) == {}


def test_a_rank_keeps_its_newest_rows() -> None:
    """Those of the end beside those of the step; what is no row is refused."""
    rows = Rows()
    for step in range(1000):
        rows.add(_row(3, step))
    rows.add(_row(3, 999, flags=int(Flag.LAST_STATE)))
    assert len(rows.kept[0]) == 256
    assert len(rows.answer([(0, 999, False), (0, 999, True), (0, 2, False)])) == 2
    judge = _Judge()
    judge.take(70, odd=3)
    for bad in ("", "AAAA", "\u1234"):
        with pytest.raises(ValueError, match="no row"):
            judge.whole.hear(1, bad)
