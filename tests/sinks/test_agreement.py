"""What counts as compared and as disagreeing."""

from __future__ import annotations

from ddpdebug.schema.row import Digest, Flag, Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks.agreement import dissenters


def step(*rows: Row) -> Step:
    """Build a step of these rows."""
    return Step(step=0, optimizer=0, world=len(rows), rows={row.rank: row for row in rows})


def test_only_what_two_ranks_computed_was_compared() -> None:
    """A digest that one rank has, or none, is no comparison."""
    assert dissenters(step(Row(), Row(rank=1))) == {}
    assert dissenters(step(Row(params_after_digest=Digest(5)), Row(rank=1))) == {}


def test_outvoted_ranks_are_named() -> None:
    """One of three, and all where there is no majority."""
    rows = [
        Row(rank=i, params_after_digest=Digest(5), grads_digest=Digest(i + 1), modes_digest=Digest(7)) for i in range(3)
    ]
    rows[2] = rows[2]._replace(params_after_digest=Digest(6))
    assert dissenters(step(*rows)) == {"parameters": {2}, "gradients": {0, 1, 2}, "modes": set()}


def test_declared_differences_do_not_count() -> None:
    """Sharded state and local SGD differ on purpose."""
    rows = [
        Row(rank=i, flags=flags, state_digest=Digest(i + 1), params_after_digest=Digest(i + 1), hyper_digest=Digest(3))
        for i, flags in enumerate((Flag.SHARDED_STATE, Flag.LOCAL_ONLY))
    ]
    assert dissenters(step(*rows)) == {"hyperparameters": set()}
