"""The votes of the numeric guard, without processes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ddpdebug.exchange.step_vote import Ballot, NumericGuard
from ddpdebug.schema.finding import Finding, Severity


class Ranks:
    """Guards that hear each other."""

    def __init__(self, world: int, mode: str = "skip", *, wait_seconds: float = 60.0) -> None:
        self.troubles: list[str] = []
        self.guards: list[NumericGuard] = []
        for rank in range(world):
            guard = NumericGuard(mode, 3, self._speaker(rank), self._trouble, wait_seconds=wait_seconds)
            guard.meet(range(world))
            self.guards.append(guard)

    def _speaker(self, rank: int) -> Any:
        def say(kind: str, **fields: Any) -> None:
            assert kind == "vote"
            for guard in self.guards:
                guard.hear(rank, fields)

        return say

    def _trouble(self, part: str, message: str) -> None:
        self.troubles.append(f"{part}: {message}")

    def decide(self, ballots: dict[int, Ballot]) -> dict[int, bool]:
        """Let these ranks vote at the same time."""
        decided: dict[int, bool] = {}

        def vote(rank: int, ballot: Ballot) -> None:
            decided[rank] = self.guards[rank].decide(ballot)

        threads = [threading.Thread(target=vote, args=item) for item in ballots.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return decided


def ballot(step: int = 4, *, own: bool = False, shared: bool = False, together: bool = True) -> Ballot:
    return Ballot(optimizer=0, step=step, own=own, shared=shared, together=together)


def test_one_bad_rank_decides_for_all() -> None:
    """What one rank alone sees keeps every rank from the step, and only from that step."""
    ranks = Ranks(4)
    assert ranks.decide({r: ballot(4, own=r == 2) for r in range(4)}) == dict.fromkeys(range(4), True)
    assert ranks.decide({r: ballot(5) for r in range(4)}) == dict.fromkeys(range(4), False)
    assert ranks.troubles == []


def test_a_rank_that_does_not_answer_is_waited_for_once() -> None:
    """Without an answer the reduced gradients decide, and from then on nobody waits."""
    ranks = Ranks(2, wait_seconds=0.05)
    assert ranks.decide({0: ballot(4, own=True)}) == {0: False}
    assert ranks.decide({0: ballot(5, shared=True)}) == {0: True}
    assert ranks.troubles == ["guard: no word on step 4 from rank 1; each rank now goes by its own gradients"]


def test_a_rank_that_leaves_is_not_waited_for() -> None:
    """The rank that is left decides by what all see alike."""
    ranks = Ranks(2)
    leaving = threading.Timer(0.05, lambda: ranks.guards[0].meet([0]))
    leaving.start()
    assert ranks.decide({0: ballot(4, shared=True)}) == {0: True}
    leaving.join()
    assert ranks.troubles == []


def test_a_lost_exchange_ends_the_waiting() -> None:
    """When the ranks can no longer talk, a vote in progress falls back."""
    ranks = Ranks(2)
    losing = threading.Timer(0.05, ranks.guards[0].lost)
    losing.start()
    assert ranks.decide({0: ballot(4, own=True)}) == {0: False}
    losing.join()


def test_a_rank_whose_scaler_skips_does_not_hold_up_the_others() -> None:
    """The rank that never reaches its optimizer has said so."""
    ranks = Ranks(2)
    ranks.guards[1].abstain(0, 4)
    assert ranks.decide({0: ballot(4)}) == {0: False}


def test_steps_that_ranks_take_alone_are_decided_alone() -> None:
    """Inside Join and the like nobody is waited for."""
    ranks = Ranks(2)
    assert ranks.decide({0: ballot(4, own=True, together=False)}) == {0: False}
    assert ranks.decide({1: ballot(4, shared=True, together=False)}) == {1: True}


def test_a_single_process_goes_by_what_it_sees() -> None:
    """In a world of one a bad loss is enough."""
    assert Ranks(1).decide({0: ballot(own=True)}) == {0: True}


def test_skips_are_counted_in_a_window() -> None:
    """The fourth skip in a thousand steps is too many, the fourth in a lifetime is not."""
    (guard,) = Ranks(1).guards
    assert [guard.too_many(0, step) for step in (0, 400, 800, 1200)] == [None] * 4
    assert guard.too_many(1, 3) is None
    assert guard.too_many(0, 1201) == "4 of the last 1000 steps were non-finite, and --max-skips is 3"


def test_the_error_is_the_finding_about_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text comes from the rules as soon as they have judged the step, and from the vote when they say nothing."""
    (guard,) = Ranks(1, "stop").guards
    finding = Finding(
        code="NUM301", severity=Severity.CRITICAL, title="bad", step=4, last_step=4, ranks=(1,), subject=("head",)
    )
    monkeypatch.setattr("ddpdebug.exchange.step_vote.FINDING_SECONDS", 60.0)
    telling = threading.Timer(0.05, guard.found, [finding])
    telling.start()
    assert str(guard.error(ballot(4))) == "NUM301 bad at step 4, ranks 1: head"
    telling.join()
    monkeypatch.setattr("ddpdebug.exchange.step_vote.FINDING_SECONDS", 0.01)
    assert str(Ranks(1, "stop").guards[0].error(ballot(7, shared=True))).startswith("NUM303 ")
