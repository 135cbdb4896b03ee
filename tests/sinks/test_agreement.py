"""What counts as compared and as disagreeing."""

from __future__ import annotations

import math

import pytest

from ddpdebug.detectors.comparison import classes_of, culprits
from ddpdebug.detectors.kinds import Detector, Severity
from ddpdebug.schema.announcements import Structure, WrapperGroup
from ddpdebug.schema.finding import UNDECIDED
from ddpdebug.schema.row import Digest, Flag, Row
from ddpdebug.schema.step import Step, outvoted
from ddpdebug.sinks.agreement import dissenters
from ddpdebug.sinks.text import evidence_lines, where


def step(*rows: Row) -> Step:
    """Build a step of these rows."""
    return Step(step=0, optimizer=0, world=len(rows), rows={row.rank: row for row in rows})


def test_only_what_two_ranks_computed_was_compared() -> None:
    """A digest that one rank has, or none, is no comparison."""
    assert dissenters(step(Row(), Row(rank=1))) == {}
    assert dissenters(step(Row(params_after_digest=Digest(5)), Row(rank=1))) == {}


def test_outvoted_ranks_are_named() -> None:
    """One of three, and all without a majority."""
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


def test_agreement_counts_where_a_difference_would_not() -> None:
    """Of replicas that are averaged now and then, those before the step."""
    rows = [
        Row(rank=i, flags=Flag.LOCAL_ONLY, params_before_digest=Digest(4), params_after_digest=Digest(i + 1))
        for i in range(2)
    ]
    assert dissenters(step(*rows)) == {"parameters": set()}


@pytest.mark.parametrize(
    ("values", "blamed", "undecided"),
    [
        ("aaaa", (), ()),
        ("abaa", (1,), ()),
        ("abca", (1, 2), ()),  # two faults: the largest group is right although it is half of the ranks
        ("abcdefaa", (1, 2, 3, 4, 5), ()),
        ("ab", (0, 1), ((0,), (1,))),
        ("aabb", (0, 1, 2, 3), ((0, 1), (2, 3))),
        ("ababc", (0, 1, 2, 3, 4), ((0, 2), (1, 3), (4,))),
        ("abc", (0, 1, 2), ((0,), (1,), (2,))),
        ("abcdef", (0, 1, 2, 3, 4, 5), ((0,), (1,), (2,), (3,))),  # not all of them by name
    ],
)
def test_the_largest_group_of_equals_is_right_if_there_is_one(
    values: str, blamed: tuple[int, ...], undecided: tuple[tuple[int, ...], ...]
) -> None:
    """Otherwise all ranks are named, and who stands against whom."""
    found = outvoted(dict(enumerate(values)))
    assert (found, found.undecided) == (blamed, undecided)


def test_groups_of_other_models_do_not_outvote_each_other() -> None:
    """Two of each model, both at odds: that rank 0 and rank 2 come first does not make them right."""
    rows = {rank: Row(rank=rank, params_after_digest=Digest(rank + 1)) for rank in range(4)}
    wraps = {rank: {"ranks": (rank // 2 * 2, rank // 2 * 2 + 1), "beside": ()} for rank in range(4)}
    facts = {
        "group:0": {rank: WrapperGroup(**wrap) for rank, wrap in wraps.items()},
        "structure:0": {rank: Structure(digest=str(rank // 2)) for rank in range(4)},
    }
    classes = classes_of(Step(step=0, optimizer=0, world=4, rows=rows, facts=facts), "params_after_digest")
    assert classes is not None
    assert culprits(classes).undecided


def test_a_finding_says_that_there_is_no_majority() -> None:
    """Beside its place, and who stands against whom; where ranks are outvoted nothing is said."""

    class Rule(Detector):
        code, severity, title = "X100", Severity.ERROR, "they differ"

    tied = Rule().finding(ranks=outvoted(dict(enumerate("aabb"))), evidence={"number": 3})
    assert tied.evidence == {UNDECIDED: [[0, 1], [2, 3]], "number": 3}
    assert where(tied, 4) == "all 4 ranks (no majority)"
    assert evidence_lines(tied.evidence) == ["ranks 0-1 against ranks 2-3 · number: 3"]
    clear = Rule().finding(ranks=outvoted(dict(enumerate("abca"))), evidence={"number": 3})
    assert (where(clear, 4), clear.evidence) == ("ranks 1-2", {"number": 3})


def test_what_a_rank_does_by_itself_is_the_step_without_the_wait_for_the_others() -> None:
    """Also what it loses between loader and forward; nothing is negative, and unknown phases take no time."""
    slow = Row(
        step_seconds=0.5,
        data_seconds=0.01,
        forward_seconds=0.02,
        backward_seconds=0.18,
        backward_local_seconds=0.05,
        sync_wait_seconds=0.13,
        collective_seconds=0.02,
        optimizer_seconds=0.02,
    )
    assert (slow.other_seconds, slow.own_seconds) == (pytest.approx(0.25), pytest.approx(0.35))
    known = {"data": 0.01, "forward": 0.02, "backward": 0.05, "optimizer": 0.02, "other": 0.25}
    assert slow.own_phases == pytest.approx(known)
    assert Row(step_seconds=0.5, backward_seconds=0.0).own_seconds == 0.5
    assert math.isnan(Row(step_seconds=0.5).own_seconds)  # nobody knows how long it waited
    assert Row(step_seconds=0.3, backward_seconds=0.1).own_seconds == pytest.approx(0.2)
    assert Row(step_seconds=0.1, forward_seconds=0.2).other_seconds == 0
    assert math.isnan(Row(forward_seconds=0.2).other_seconds)
