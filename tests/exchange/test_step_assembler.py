"""Rows become steps."""

from __future__ import annotations

import pytest

from ddpdebug.exchange.step_assembler import LAG_STEPS, LATE_STEPS, Assembler, fault_of
from ddpdebug.schema.row import Flag, Row


def add(assembler: Assembler, rank: int, step: int, optimizer: int = 0) -> None:
    assembler.add(rank, Row(rank=rank, step=step, optimizer=optimizer))


def test_a_step_is_complete_when_every_rank_has_delivered() -> None:
    """Until then it waits."""
    assembler = Assembler(2)
    add(assembler, 0, 0)
    assert list(assembler.ready()) == []
    add(assembler, 1, 0)
    (step,) = assembler.ready()
    assert (step.step, sorted(step.rows)) == (0, [0, 1])


def test_the_rows_of_two_optimizers_are_not_mixed() -> None:
    """A GAN has two streams of steps."""
    assembler = Assembler(2)
    for optimizer in (0, 1):
        for rank in (1, 0):
            add(assembler, rank, 0, optimizer)
    assert [(s.optimizer, sorted(s.rows)) for s in assembler.ready()] == [(0, [0, 1]), (1, [0, 1])]


def test_a_rank_that_left_is_not_waited_for() -> None:
    """Its absence shows in the rows."""
    assembler = Assembler(3)
    add(assembler, 0, 0)
    add(assembler, 1, 0)
    assembler.set_members((0, 1))
    (step,) = assembler.ready()
    assert sorted(step.rows) == [0, 1]


def test_a_rank_that_lags_far_behind_is_not_waited_for() -> None:
    """It may have stopped to train while the others go on (Join)."""
    assembler = Assembler(2)
    for step in range(LATE_STEPS + 1):
        add(assembler, 0, step)
    (first,) = assembler.ready()
    assert (first.step, sorted(first.rows)) == (0, [0])
    add(assembler, 1, 0)
    assert assembler.waiting == LATE_STEPS


def test_a_rank_that_is_only_late_is_waited_for() -> None:
    """Without synchronised gradients nothing keeps the ranks together."""
    assembler = Assembler(2)
    for step in range(3 * LAG_STEPS):
        add(assembler, 0, step)
    assert list(assembler.ready()) == []
    add(assembler, 1, 0)
    (first,) = assembler.ready()
    assert (first.step, sorted(first.rows)) == (0, [0, 1])


def test_a_rank_that_has_passed_the_step_is_not_waited_for_as_long() -> None:
    """It did not step this optimizer."""
    assembler = Assembler(2)
    for step in range(LAG_STEPS + 1):
        add(assembler, 0, step)
        add(assembler, 0, step, 1)
        add(assembler, 1, step, 1)
    overdue = [s.step for s in assembler.ready() if s.optimizer == 0]
    assert overdue == [0]


def test_the_rest_comes_out_at_the_end() -> None:
    """Nothing that was delivered is lost."""
    assembler = Assembler(2)
    add(assembler, 0, 3)
    assert [s.step for s in assembler.rest()] == [3]
    assert assembler.waiting == 0


def test_what_ranks_could_not_deliver_any_more_is_not_judged() -> None:
    """Where the exchange was lost, a missing row says nothing about the rank."""
    assembler = Assembler(2)
    add(assembler, 0, 3)
    add(assembler, 1, 3)
    add(assembler, 0, 4)
    assert [s.step for s in assembler.rest(complete=True)] == [3]


@pytest.mark.parametrize(
    "row, says",
    [
        (Row(rank=1, step=5, optimizer=2, flags=int(Flag.CHECKED | Flag.VAL_LOSS_SEEN)), None),
        (Row(rank=0, step=5), "it says that it is of rank 0"),
        (Row(rank=1, step=79289689636194693), "it is of step 79289689636194693, and no rank has taken more than 6"),
        (Row(rank=1, step=-1), "it is of step -1, and no rank has taken more than 6"),
        (Row(rank=1, step=5, optimizer=-3), "it is of optimizer -3"),
        (Row(rank=1, step=5, flags=-1), "its flags -0x1 are unknown"),
        (Row(rank=1, step=5, flags=1 << 60), "its flags 0x1000000000000000 are unknown"),
    ],
)
def test_rows_that_cannot_be_true(row: Row, says: str | None) -> None:
    """Damaged memory or a foreign program may send anything."""
    assert fault_of(row, 1, 6) == says
