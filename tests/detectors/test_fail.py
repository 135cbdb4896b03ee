"""FAIL1024: who has left, as soon as it is known, and how."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdebug.detectors.catalog import catalog
from ddpdebug.detectors.kinds import Finding
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.schema.announcements import CutBackward, End, Failure

_LOST = "exception: RuntimeError: [/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4321. "
_RULE = next(rule for rule in catalog() if rule.code == "FAIL1024")


def test_a_backward_that_was_cut_short_leaves_no_parameter_unused() -> None:
    """Who has caught an exception of a backward is told so, and of its line."""
    cut = CutBackward(error="ValueError: an empty mask", step=12, location="train.py:60")
    text = "exception: RuntimeError: Expected to have finished reduction in the prior iteration"
    rule = next(rule for rule in catalog() if rule.code == "FAIL1001")
    (found,) = rule().compare("alone:failure", {1: Failure(reason=text, missing=("stem.weight",), cut_short=cut)})
    assert (found.subject, found.location, found.ranks) == ((), "train.py:60", (1,))
    told = "the backward before was cut short in step 12: ValueError: an empty mask at train.py:60"
    assert found.evidence["observed"] == told
    assert not any("find_unused_parameters=True" in action for action in found.actions)


def _job(*told: tuple[int, Any], world: int, finish: bool = True) -> list[Finding]:
    diagnosis = Diagnosis(world=world, config={"world": world}, detectors=[_RULE({"world": world})])
    new = []
    for rank, announcement in told:
        diagnosis.tell(announcement.topic, rank, announcement)
        new += diagnosis.tick()
    return [finding for finding, is_new in (*new, *(diagnosis.finish() if finish else ())) if is_new]


def _victim(step: int = 7) -> Failure:
    return Failure(reason=_LOST, raised_in=step, location="train.py:40", phase="backward")


def test_a_rank_with_an_exception_of_its_own_is_named_at_once() -> None:
    """Launchers end the others soon: the culprit, its line and its error are told before the end."""
    culprit = Failure(reason="exception: KeyError: 'labels'", raised_in=7, location="train.py:31", phase="between")
    (found,) = _job((2, culprit), (0, _victim()), (1, _victim()), world=4, finish=False)
    assert (found.ranks, found.step, found.location) == ((2,), 7, "train.py:31")
    assert found.evidence["left"] == {"2": "KeyError: 'labels'"}
    assert found.evidence["others_waited_in"] == {"0": "step 7 · backward · train.py:40"}
    assert found.evidence["their_error"] == "RuntimeError: Connection closed by peer [127.0.0.1]:4321."


def test_a_rank_that_ended_earlier_is_named_with_its_steps() -> None:
    """It had less to do; the other one waited for it."""
    ends = [(1, End(steps={"0": 5}, reason="finished")), (0, End(steps={"0": 5}, reason=_LOST))]
    (found,) = _job((0, _victim()), *ends, world=2, finish=False)
    assert (found.ranks, found.step, found.location) == ((1,), 5, None)
    assert found.evidence["left"] == {"1": "finished after 5 optimizer steps"}
    assert "fewer batches" in found.causes[0]


@pytest.mark.parametrize("world, left", [(2, (1,)), (4, ())])
def test_who_has_said_nothing_is_named_where_only_one_can_be_meant(world: int, left: tuple[int, ...]) -> None:
    """Nobody is named where several may have gone."""
    (found,) = _job((0, _victim()), world=world)
    assert (found.ranks, found.location) == (left, None)
    assert "without a word" in found.evidence["left"]
    assert "killed" in found.causes[0]


def test_ranks_that_raise_alike_have_not_left_each_other() -> None:
    """An error of all ranks is no departure."""
    same = Failure(reason="exception: KeyError: 'labels'", raised_in=0)
    assert _job((0, same), (1, same), world=2) == []
