"""Rows become steps."""

from __future__ import annotations

from ddpdebug.assembly import LAG_STEPS, LATE_STEPS, Assembler
from ddpdebug.observations import Row


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
