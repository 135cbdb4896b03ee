"""The steps of very many ranks as the judge gets them."""

from __future__ import annotations

import base64

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


def _part(step: int, ranks: range = range(_WORLD), odd: int | None = None) -> tuple[Key, StepPart]:
    whole = Partial()
    for rank in ranks:
        whole.add_row(_row(rank, step, odd))
    ((key, part),) = whole.steps.items()
    return key, part


class _Judge:
    def __init__(self) -> None:
        self.asked: list[int] = []
        self.now = 0.0
        self.whole = WholeSteps(_WORLD, lambda key: self.asked.append(key[1]), lambda: self.now)

    def take(self, step: int, odd: int | None = None) -> None:
        key, part = _part(step, odd=odd)
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
        assert (step.chosen, step.parted, step.world) == (True, odd is not None, len(step.rows))
        assert len(step.rows) <= MOST_CHOSEN
        assert step.everyone == set(range(_WORLD))
        assert step.minority("params_after_digest") == (() if odd is None else (odd,))
        assert step.values("params_after_digest")[1] == [rank for rank in range(_WORLD) if rank != odd]
        saved = step_of(0, 4, step.rows, _WORLD)
        assert (saved.chosen, saved.parted, saved.rows) == (True, odd is not None, step.rows)
    assert not step_of(0, 4, dict.fromkeys(range(_WORLD), Row()), _WORLD).chosen
    assert not step_of(0, 4, {0: Row()}, 64).chosen


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
    judge.now += 20.0
    judge.take(100, odd=31)
    judge.take(101, odd=32)
    judge.take(102, odd=33)
    assert len(judge.asked) == 6


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


def test_a_rank_keeps_its_newest_rows() -> None:
    """Those of the end beside those of the step; what is no row is refused."""
    rows = Rows()
    for step in range(1000):
        rows.add(_row(3, step))
    rows.add(_row(3, 999, flags=int(Flag.LAST_STATE)))
    assert len(rows.kept) == 256
    assert len(rows.answer([(0, 999, False), (0, 999, True), (0, 2, False)])) == 2
    judge = _Judge()
    judge.take(70, odd=3)
    for bad in ("", "AAAA", "\u1234"):
        with pytest.raises(ValueError, match="no row"):
            judge.whole.hear(1, bad)
