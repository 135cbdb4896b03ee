"""The judge of hangs: each rung of its ladder, with the case beside it in which it says nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from ddpdebug.progress.waits import (
    ANSWER_SECONDS,
    ARRIVED_SECONDS,
    CLOSED_SECONDS,
    GRAVITY,
    LEFT_SECONDS,
    MATCHED_SECONDS,
    MATCHING_SECONDS,
    RAN_SECONDS,
    RUNNING_SECONDS,
    RUNNING_SURE_SECONDS,
    SAME_CALL_SECONDS,
    SILENT_SECONDS,
    STUCK_SECONDS,
    WAIT_SECONDS,
    Seen,
    judge,
    where,
)
from ddpdebug.schema.announcements import Hang
from ddpdebug.schema.progress import MOST_RECENT, Call, RankProgress, ranks_in, spans_of
from ddpdebug.schema.wire import from_json, to_json

WORLD = (0, 1, 2, 3)


def call(operation: str = "all_reduce", number: int = 6, **more) -> Call:
    return Call(**{"group": "0", "ranks": WORLD, "shapes": ("float32 [8]",), "location": "train.py:41", **more,
                   "operation": operation, "number": number})  # fmt: skip


def waits(rank: int, *calls: Call, seconds: float = 20.0, **more) -> Seen:
    """A rank that has stood in calls for so long, and nothing of which has moved."""
    calls = calls or (call(),)
    entered = {one.group: one.number for one in calls if not one.point_to_point}
    known = {"same": seconds, "still": seconds, "phase": "collective", "kind": "collective", "step": 5,
             "place": "train.py:41", "entered": entered, "waits": calls, **more}  # fmt: skip
    return Seen(progress=RankProgress(rank=rank, **known))


def missing(rank: int, *, still: float = 20.0, entered: int = 5, **more) -> Seen:
    """A rank that has not come to call 6, and nothing of which has moved for so long."""
    known = {"same": still, "still": still, "phase": "data", "kind": "lock", "place": "train.py:33",
             "does": "lock.acquire()", "entered": {"0": entered}, "step": 5, **more}  # fmt: skip
    return Seen(progress=RankProgress(rank=rank, **known))


def of(*ranks: Seen) -> dict[int, Seen]:
    return dict(enumerate(ranks))


def all_wait(but: Seen, rank: int = 3, **more) -> dict[int, Seen]:
    return {other: but if other == rank else waits(other, **more) for other in WORLD}


def verdict(seen: dict[int, Seen]) -> tuple[str, tuple[int, ...]] | None:
    """Judge; what is said reads the same after it was sent."""
    found = judge(seen)
    if found is None:
        return None
    assert from_json(Hang, json.loads(json.dumps(to_json(found)))) == found
    return found.kind, found.ranks


def test_nobody_waits() -> None:
    """Ranks that all do something of their own, or that have stood in a call for a moment only."""
    assert verdict(of(*(missing(rank) for rank in WORLD))) is None
    assert verdict(all_wait(missing(3), seconds=WAIT_SECONDS / 2)) is None
    assert verdict({}) is None


# --- left -------------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_waited_for_has_left() -> None:
    """It is named once it has been away for a moment, with why."""
    gone = Seen(left="it has ended: finished", left_for=LEFT_SECONDS, left_at="train.py:52", entered={"0": 5})
    assert verdict(all_wait(gone)) == ("left", (3,))
    found = judge(all_wait(gone))
    assert found is not None
    assert found.location == "train.py:52"
    assert found.where == {"3": "it has ended: finished, at train.py:52"}
    assert found.waits == {"0-2": "all_reduce #6 of float32 [8] at train.py:41"}
    assert found.calls == {"0": 6, "1": 6, "2": 6, "3": 5}


_FINISHED = {"left": "it has ended: finished", "left_for": 60.0}


@pytest.mark.parametrize(
    "gone, named",
    [
        (Seen(**_FINISHED, entered={"0": 6}), 2),
        (Seen(**_FINISHED, entered={"0": 5}), 1),
        (Seen(**_FINISHED), 2),  # nothing is known
        (Seen(**_FINISHED, entered={}), 2),
        (Seen(**_FINISHED, progress=missing(1, entered=1).progress), 2),  # an old look
        (Seen(**_FINISHED, progress=missing(1, entered=5, ended="finished").progress), 1),  # of its black box
        (Seen(left="it has ended: exception: KeyError: 1", left_for=60.0, progress=missing(1).progress), 1),
        (Seen(left="it has gone: it was killed by SIGKILL", left_for=60.0), 2),  # it may have given its part
    ],
)
def test_who_gave_its_part_to_a_root_may_end(gone: Seen, named: int) -> None:
    """The root of a gather waits for rank 2; rank 1 is named where it is known that it never came."""
    seen = of(waits(0, call("gather", ranks=(0, 1, 2))), gone, missing(2, still=1.0))
    assert verdict(seen) == (("left", (1,)) if named == 1 else ("busy", (2,)))


def test_one_that_was_killed_explains_what_nothing_else_does() -> None:
    """How far it had come is not known; of one that has left in order that is no proof."""
    root = waits(0, call("gather", ranks=(0, 1)))
    assert verdict(of(root, Seen(left="it has gone: it was killed by SIGKILL", left_for=60.0))) == ("left", (1,))
    assert verdict(of(root, Seen(**_FINISHED))) is None


def test_who_left_a_moment_ago_or_is_not_waited_for_is_not_named() -> None:
    """Its last message may be on the way; and a rank that is no member of the group keeps nobody."""
    assert verdict(all_wait(Seen(left="it has left", left_for=LEFT_SECONDS / 2))) is None
    pair = call(ranks=(0, 1))
    seen = of(waits(0, pair), missing(1, still=0.0), Seen(left="it has left", left_for=60.0), missing(3, still=0.0))
    assert verdict(seen) == ("busy", (1,))


def test_who_left_because_another_one_had_gone_is_not_named_beside_it() -> None:
    """A killed rank takes its neighbours with it within milliseconds: their end is a consequence."""
    killed = Seen(left="it has gone: it was killed by SIGKILL", left_for=2.0)
    victim = Seen(left="it has ended: connection closed by peer", left_for=2.0, left_by_others=True)
    assert verdict(of(victim, waits(1), killed, victim)) == ("left", (2,))
    assert verdict(of(victim, waits(1), waits(2), victim)) == ("left", (0, 3))


def test_who_has_thrown_another_one_out_is_named_for_it() -> None:
    """Also where it had come to the collective itself: a batch may fail on its way in the middle of one."""
    failed = replace(waits(3), left="it has ended: exception: KeyError: 'x'", left_for=2.0)
    victim = Seen(left="it has ended: connection closed by peer", left_for=2.0, left_by_others=True)
    assert verdict(of(waits(0), victim, waits(2), failed)) == ("left", (3,))
    assert verdict(of(waits(0), victim, waits(2), replace(failed, left_for=0.1))) is None


def test_several_have_left() -> None:
    """All of them are named, and one that left before the other explains it no less."""
    gone = Seen(left="it has left", left_for=2.0)
    assert verdict(of(waits(0), gone, waits(2), gone)) == ("left", (1, 3))


# --- different calls --------------------------------------------------------------------------------------------------


def test_another_operation_at_the_same_place() -> None:
    """Three against one: the one is named, with both calls and where they are."""
    seen = all_wait(waits(3, call("broadcast", location="train.py:43")))
    assert verdict(seen) == ("mismatch", (3,))
    found = judge(seen)
    assert found is not None
    assert found.difference == "operation"
    assert found.location == "train.py:43"
    assert found.sides == {
        "0-2": "all_reduce #6 of float32 [8] at train.py:41",
        "3": "broadcast #6 of float32 [8] at train.py:43",
    }
    assert found.undecided == ()


@pytest.mark.parametrize("world", [(0, 1), WORLD])
def test_a_tie_blames_nobody(world: tuple[int, ...]) -> None:
    """Half against half: all are named, as two sides."""
    half = len(world) // 2
    sides = world[:half], world[half:]
    seen = {rank: waits(rank, call("all_reduce" if rank < half else "barrier", ranks=world)) for rank in world}
    assert verdict(seen) == ("mismatch", world)
    found = judge(seen)
    assert found is not None
    assert found.undecided == sides


@pytest.mark.parametrize(
    "other, difference",
    [
        ({"shapes": ("float32 [9]",)}, "shape"),
        ({"shapes": ("float64 [8]",)}, "dtype"),
        ({"root": 1}, "root"),
    ],
)
def test_the_same_operation_with_something_else(other: dict, difference: str) -> None:
    """Shape, type or root."""
    seen = {rank: waits(rank, call(**({"root": 0} | (other if rank == 2 else {})))) for rank in WORLD}
    found = judge(seen)
    assert found is not None
    assert (found.kind, found.ranks, found.difference) == ("mismatch", (2,), difference)


def test_the_first_difference_is_named() -> None:
    """Not the calls in which the ranks have come to a stop, when an earlier one was another."""
    early, late = call(number=5), call(number=6)
    odd = call("barrier", 5, location="train.py:50"), call("broadcast", 6)
    seen = {rank: waits(rank, late, recent=(early, late)) for rank in (0, 1, 2)}
    seen[3] = waits(3, odd[1], recent=odd)
    found = judge(seen)
    assert found is not None
    assert (found.kind, found.ranks, found.location) == ("mismatch", (3,), "train.py:50")


def test_calls_that_have_completed_are_no_mismatch() -> None:
    """Whatever they were, they have kept nobody; one that is not done on some side has."""
    earlier = {rank: call("barrier" if rank == 3 else "broadcast", 5, is_done=True) for rank in WORLD}
    seen = {rank: waits(rank, recent=(one,)) for rank, one in earlier.items() if rank != 2}
    assert verdict({**seen, 2: missing(2, still=1.0)}) == ("busy", (2,))
    seen[0] = waits(0, recent=(call("broadcast", 5),))
    found = judge({**seen, 2: waits(2, recent=(earlier[2],))})
    assert found is not None
    assert (found.kind, found.ranks) == ("mismatch", (3,))


@pytest.mark.parametrize(
    "ours, theirs, difference",
    [
        ("float32 []", "float32 [1]", None),
        ("float32 [2, 4]", "float32 [8]", None),
        ("float32 [2, 4]", "float32 [9]", "shape"),
        ("float32 [0]", "float32 []", "shape"),
        ("float32 [1]", "int64 []", "dtype"),
        ("float32 (cut", "float32 [8]", "shape"),
    ],
)
def test_torch_compares_numbers_of_elements(ours: str, theirs: str, difference: str | None) -> None:
    """Not shapes."""
    assert call(shapes=(ours,)).differs(call(shapes=(theirs,))) == difference


def test_what_may_differ_is_no_mismatch() -> None:
    """Parts of another size to be gathered; another line; calls of another group with the same number."""
    gathered = [call("gather", shapes=(f"float32 [{rank}]",), location=f"train.py:{rank}") for rank in WORLD]
    assert verdict({rank: waits(rank, one, seconds=5.0) for rank, one in zip(WORLD, gathered, strict=True)}) is None
    left, right = call("all_reduce", group="1", ranks=(0, 1)), call("broadcast", group="2", ranks=(2, 3))
    seen = of(waits(0, left), missing(1, entered=0), waits(2, right), missing(3, entered=0))
    assert verdict(seen) == ("stuck", (1, 3))


def test_a_difference_is_not_told_at_once() -> None:
    """A rank that goes on is not in the call for good; one that spins as it waits is, as with a device."""
    assert verdict(all_wait(waits(3, call("broadcast"), seconds=CLOSED_SECONDS / 2))) is None
    assert verdict(all_wait(waits(3, call("broadcast"), still=0.0))) == ("mismatch", (3,))


def test_all_are_asked_before_one_is_blamed() -> None:
    """Of four only two have said what they called: the other two decide who is in the minority, if they answer."""
    seen = of(waits(0, call("barrier"), seconds=CLOSED_SECONDS), waits(1, seconds=CLOSED_SECONDS),
              *(waits(rank, seconds=WAIT_SECONDS / 2) for rank in (2, 3)))  # fmt: skip
    assert verdict(seen) is None
    late = CLOSED_SECONDS + ANSWER_SECONDS
    assert verdict({**seen, 0: waits(0, call("barrier"), seconds=late), 1: waits(1, seconds=late)}) == (
        "mismatch",
        (0, 1),
    )
    seen |= {rank: waits(rank, seconds=WAIT_SECONDS) for rank in (2, 3)}
    assert verdict(seen) == ("mismatch", (0,))


# --- a circle ---------------------------------------------------------------------------------------------------------


def crossed(rank: int, group: str) -> Seen:
    return waits(rank, call(number=1, group=group), entered={group: 1})


def test_two_groups_in_another_order() -> None:
    """Everybody waits for somebody who waits: two against two, nobody is blamed; three against one, the one is."""
    found = judge(of(crossed(0, "a"), crossed(1, "b"), crossed(2, "a"), crossed(3, "b")))
    assert found is not None
    assert (found.kind, found.ranks, found.difference) == ("cycle", WORLD, "order")
    assert found.undecided == ((0, 2), (1, 3))
    assert verdict(of(crossed(0, "a"), crossed(1, "a"), crossed(2, "b"), crossed(3, "a"))) == ("cycle", (2,))


def test_groups_of_other_ranks_are_named() -> None:
    """Two of four reduce in their half while the other two reduce among all."""

    def reduces(rank: int, group: str, ranks: tuple[int, ...]) -> Seen:
        return waits(rank, call(number=1, group=group, ranks=ranks), entered={group: 1})

    halves = [reduces(rank, "half", (0, 2)) for rank in (0, 1)]
    found = judge(of(*halves, *(reduces(rank, "all", WORLD) for rank in (2, 3))))
    assert found is not None
    assert {ranks: words.partition(" among ")[2].partition(" at ")[0] for ranks, words in found.sides.items()} == {
        "0-1": "ranks 0,2",
        "2-3": "ranks 0-3",
    }


def test_a_circle_is_told_once_all_stand_still() -> None:
    """While one of them moves, it may open."""
    seen = of(crossed(0, "a"), crossed(1, "b"), crossed(2, "a"), crossed(3, "b"))
    moving = waits(3, call(number=1, group="b"), still=CLOSED_SECONDS / 2)
    assert verdict({**seen, 3: moving}) is None


def test_a_message_that_nobody_sends() -> None:
    """A rank receives while the others go on in the order that they share, each as far as it gets."""
    receives = call("recv", 1, point_to_point=True, ranks=WORLD)
    seen = of(waits(0, call(number=6)), waits(1, call(number=8)), waits(2, receives, entered={"0": 5}),
              waits(3, call(number=8)))  # fmt: skip
    assert verdict(seen) == ("cycle", (2,))


def test_a_message_that_is_being_sent() -> None:
    """Its two ends wait for no third one."""
    pair = [call(name, 1, point_to_point=True, root=other) for name, other in (("send", 1), ("recv", 0))]
    assert verdict(of(waits(0, pair[0]), waits(1, pair[1]))) is None


def test_a_circle_of_messages() -> None:
    """Each sends to the next one, and nobody receives: that another one sends too is no answer."""
    ring = {rank: call("send", 1, point_to_point=True, root=(rank + 1) % 4) for rank in WORLD}
    assert verdict({rank: waits(rank, one) for rank, one in ring.items()}) == ("cycle", WORLD)
    other = call("recv", 1, point_to_point=True, root=3)
    assert verdict(of(waits(0, ring[0]), waits(1, other), waits(2), missing(3, still=20.0))) == ("stuck", (3,))


def test_a_call_that_all_have_entered_is_in_flight() -> None:
    """Who waits for one whose data is on the way waits in no circle, however far that is."""
    pair = call(number=1, group="pair", ranks=(2, 3))
    flying = {rank: waits(rank, pair, entered={"pair": 1, "0": 5}) for rank in (2, 3)}
    assert verdict({0: waits(0), 1: waits(1), **flying}) is None
    chain = call(number=1, group="a", ranks=(1, 2))
    seen = {0: waits(0, call(ranks=(0, 1))), 1: waits(1, chain, entered={"a": 1}), **flying}
    assert verdict(seen) is None
    a, b = (call(number=1, group=group, ranks=(0, 1)) for group in "ab")
    circle = {0: waits(0, a, entered={"a": 1}), 1: waits(1, b, entered={"b": 1})}
    assert verdict({**circle, **flying}) == ("cycle", (0, 1))


def test_a_rank_with_several_calls_moves_with_any_of_them() -> None:
    """Two have begun something that the other has not come to yet, and wait for what both are in."""
    both = call(ranks=(0, 1))
    begun = [call(number=1, group=group, ranks=(0, 1)) for group in "ab"]
    seen = of(waits(0, begun[0], both, entered={"a": 1, "0": 6}), waits(1, begun[1], both, entered={"b": 1, "0": 6}))
    assert verdict(seen) is None


def test_the_meeting_of_a_group_that_only_some_make() -> None:
    """It is in the store, under no group's name."""
    meeting = call("new_group", 0, group="", shapes=())
    seen = {rank: waits(rank) for rank in (0, 1, 2)} | {3: waits(3, meeting, kind="store", entered={"0": 5})}
    assert verdict(seen) == ("cycle", (3,))


def test_all_are_in_the_same_call() -> None:
    """Data may be on the way: only a very long stand of all of them is told, and nobody is blamed."""
    assert verdict({rank: waits(rank, seconds=SAME_CALL_SECONDS - 1) for rank in WORLD}) is None
    found = judge({rank: waits(rank, seconds=SAME_CALL_SECONDS) for rank in WORLD})
    assert found is not None
    assert (found.kind, found.ranks, found.difference) == ("cycle", WORLD, "unknown")
    long = 2 * SAME_CALL_SECONDS
    moves = {rank: waits(rank, seconds=long) for rank in (0, 1, 2)} | {3: waits(3, seconds=long, still=1.0)}
    assert verdict(moves) is None
    other_root = {rank: waits(rank, call("broadcast", root=rank == 3), seconds=CLOSED_SECONDS) for rank in WORLD}
    assert verdict(other_root) == ("mismatch", (3,))


# --- silent, stuck, busy ----------------------------------------------------------------------------------------------


def test_no_sign_of_life() -> None:
    """The state that the kernel shows stands beside it; its last line is the last that it was seen at."""
    last = missing(3).progress
    seen = all_wait(Seen(progress=last, silent=SILENT_SECONDS, kernel="stopped by a signal"))
    assert verdict(seen) == ("silent", (3,))
    found = judge(seen)
    assert found is not None
    assert (found.phase, found.blocked_in) == ("interpreter", None)
    assert found.where["3"].startswith("no sign of life for 5 s, the kernel shows it stopped by a signal, last seen at")
    assert verdict(all_wait(Seen(progress=last, silent=SILENT_SECONDS - 0.5))) is None


@pytest.mark.parametrize(
    "silent, ran, named",
    [
        (RUNNING_SECONDS, RAN_SECONDS, True),
        (RUNNING_SURE_SECONDS, RAN_SECONDS, True),
        (RUNNING_SECONDS - 1, RAN_SECONDS, False),  # several threads
        (10 * RUNNING_SECONDS, RAN_SECONDS - 1, False),  # on a machine that is far too busy
    ],
)
def test_code_in_c_that_runs_may_be_done_soon(silent: float, ran: float, named: bool) -> None:
    """It is named once it has had both time and a processor for long."""
    seen = all_wait(Seen(silent=silent, runs=True, ran=ran))
    found = judge(seen)
    assert (found is not None) == named
    if found is not None:
        sure = silent >= RUNNING_SURE_SECONDS
        assert (found.kind, found.ranks, found.runs) == ("silent" if sure else "stuck", (3,), not sure)
        assert (found.phase, found.blocked_in) == ("interpreter", None)


@pytest.mark.parametrize(
    "kind, now, silent, ran, named",
    [
        ("regex", True, MATCHING_SECONDS, MATCHED_SECONDS, True),
        ("regex", True, MATCHING_SECONDS - 1, MATCHED_SECONDS, False),
        ("regex", True, RUNNING_SECONDS - 1, MATCHED_SECONDS - 1, False),  # it does not get a processor
        ("regex", False, RUNNING_SECONDS - 1, MATCHED_SECONDS, False),  # where it was last seen says nothing
        ("", True, RUNNING_SECONDS - 1, MATCHED_SECONDS, False),
    ],
)
def test_a_regular_expression_that_does_not_end_is_accused(
    kind: str, now: bool, silent: float, ran: float, named: bool
) -> None:
    """It looks like pickling from outside; its frames, read now, tell."""
    progress = replace(missing(3).progress or RankProgress(rank=3), kind=kind)
    found = judge(all_wait(Seen(progress=progress, silent=silent, runs=True, ran=ran, now=now, kernel="running")))
    assert (found is not None) == named
    if found is not None:
        assert (found.kind, found.ranks, found.runs) == ("silent", (3,), False)
        assert "in a regular expression" in found.where["3"]


def test_of_two_silent_ranks_the_one_that_does_not_run_is_named() -> None:
    """It is sure, the other may be done yet."""
    seen = all_wait(Seen(silent=RUNNING_SECONDS, runs=True, ran=RAN_SECONDS))
    assert verdict({**seen, 2: Seen(silent=SILENT_SECONDS)}) == ("silent", (2,))


def test_kinds_by_gravity() -> None:
    """A graver one may take the place of what was said before."""
    assert sorted(GRAVITY, key=lambda kind: GRAVITY[kind]) == ["busy", "stuck", "silent", "cycle", "mismatch", "left"]
    assert {*GRAVITY} == {*get_args(get_type_hints(Hang)["kind"])}


@pytest.mark.parametrize("known", [{"number": 1, "point_to_point": True}, {"number": 0, "group": "", "ranks": ()}])
def test_who_waits_for_work_from_anybody_accuses_nobody(known: dict) -> None:
    """A server of parameters is in `recv` by design; where the peer is named, that one keeps it."""
    still = [missing(rank, still=60.0) for rank in (1, 2, 3)]
    assert verdict(of(waits(0, call("recv", **known), seconds=60.0), *still)) is None
    named = call("recv", **known, root=2)
    assert verdict(of(waits(0, named, seconds=60.0), *still)) == ("stuck", (2,))
    left = Seen(left="it has ended: finished", left_for=60.0, entered={"0": 5})
    assert verdict(of(waits(0, call("recv", **known)), left, *still[:2])) is None


def test_nothing_moves_in_a_rank() -> None:
    """It is named after some time without movement, with phase, line, and what it waits for."""
    seen = all_wait(missing(3, still=STUCK_SECONDS))
    assert verdict(seen) == ("stuck", (3,))
    found = judge(seen)
    assert found is not None
    assert (found.phase, found.location, found.blocked_in, found.step) == ("data", "train.py:33", "lock", 5)
    assert found.where == {"3": "waits for a lock, at train.py:33: lock.acquire(), in data"}
    assert found.calls == {"0": 6, "1": 6, "2": 6, "3": 5}


@pytest.mark.parametrize("still", [0.0, STUCK_SECONDS - 0.1])
def test_a_rank_in_which_anything_moves_is_at_work(still: float) -> None:
    """However long the others wait."""
    assert verdict(all_wait(missing(3, still=still), seconds=3600.0)) == ("busy", (3,))


def test_of_two_that_are_waited_for_one_works() -> None:
    """The other one may wait for it, by a file for one."""
    seen = of(waits(0), waits(1), missing(2, still=60.0), missing(3, still=0.0))
    assert verdict(seen) == ("busy", (3,))
    assert verdict({**seen, 3: missing(3, still=60.0)}) == ("stuck", (2, 3))


def test_a_rank_that_came_a_moment_ago_may_be_what_another_one_has_waited_for() -> None:
    """Who looks for a file from time to time has not seen it yet."""
    came = waits(2, seconds=ARRIVED_SECONDS - 0.5)
    assert verdict({**all_wait(missing(3, still=60.0)), 2: came}) == ("busy", (3,))
    assert verdict({**all_wait(missing(3, still=60.0)), 2: waits(2, seconds=ARRIVED_SECONDS)}) == ("stuck", (3,))
    went_on = missing(2, entered=9, still=0.5)  # the looks of the others are older than what it has seen since
    assert verdict({**all_wait(missing(3, still=60.0)), 2: went_on}) == ("busy", (3,))


def test_of_a_rank_of_which_nothing_is_known_nothing_is_said() -> None:
    """No look of it has come, and no sign that it is gone."""
    assert verdict(all_wait(Seen())) is None


def test_ranks_of_another_group_go_on() -> None:
    """Two of four wait for a third one; the fourth is in no group of theirs."""
    own = call(ranks=(0, 1, 2), group="1", number=2)
    seen = of(waits(0, own), waits(1, own), missing(2, still=20.0, entered=9), missing(3, still=0.0))
    assert verdict(seen) == ("stuck", (2,))


def test_a_chain_leads_to_who_is_at_its_end() -> None:
    """Rank 0 waits for rank 1 in one group, and rank 1 in another one for rank 2."""
    first, second = call(ranks=(0, 1), group="a", number=1), call(ranks=(1, 2), group="b", number=1)
    seen = of(waits(0, first), waits(1, second), missing(2, still=20.0))
    assert verdict(seen) == ("stuck", (2,))


def test_many_ranks_are_told_briefly() -> None:
    """Ranks in the same place share a stack and a line."""
    stack = ("train.py:41 (main)",)
    world = tuple(range(64))
    seen = {rank: waits(rank, call(ranks=world), stack=stack) for rank in world}
    seen[17] = missing(17, stack=("train.py:33 (load)",))
    found = judge(seen)
    assert found is not None
    assert found.ranks == (17,)
    assert set(found.stacks) == {"0-16,18-63", "17"}
    assert list(found.waits) == ["0-16,18-63"]


@pytest.mark.parametrize(
    "ranks, text",
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1), "0-1"),
        ((0, 2), "0,2"),
        (range(1024), "0-1023"),
        (range(3, 1024, 8), "3-1019:8"),
        ((0, 1, 2, 7, 9, 11, 20), "0-2,7-11:2,20"),
    ],
)
def test_ranks_are_told_briefly(ranks: Sequence[int], text: str) -> None:
    """As a text that reads as what it was made of."""
    assert (spans_of(ranks), ranks_in(text)) == (text, tuple(ranks))


@pytest.mark.parametrize("text", ["x-", "x", "-5", "0-8:0", "0-99999999999999999999", ",".join(["0-1000000"] * 9)])
def test_a_text_that_means_no_ranks(text: str) -> None:
    """From anywhere: the call is read without them."""
    with pytest.raises(ValueError, match=r"ranks|int|zero"):
        ranks_in(text)
    for value in (text, [0, 1], None):
        assert from_json(Call, {"group": "0", "number": 1, "operation": "x", "ranks": value}) == Call(
            group="0", number=1, operation="x"
        )


@pytest.mark.parametrize("ranks", [range(1024), range(5, 1024, 8)])
def test_the_look_of_a_rank_of_many_is_small(ranks: Sequence[int]) -> None:
    """It is sent by all ranks while somebody waits: less than 6 KB, whole."""
    path = "/home/somebody/project/package/training/loop.py:1234"
    shapes = ("float32 [4096, 4096]",) * 3
    calls = [
        call("all_reduce", 100_000 + number, ranks=tuple(ranks), shapes=shapes, location=path)
        for number in range(MOST_RECENT)
    ]
    look = waits(1023, calls[-1], recent=tuple(calls), stack=(f"{path} (function)",) * 12, place=path).progress
    text = json.dumps(to_json(look))
    assert len(text) < 6_000
    assert from_json(RankProgress, json.loads(text)) == look


def test_words_for_people() -> None:
    """What a rank does, and where, as far as it is known."""
    assert where(Seen()) == "nothing is known of it"
    assert where(missing(0, still=1.0, kind="", phase="forward", does="", place="model.py:3")) == (
        "runs, at model.py:3, in forward"
    )
    loader = missing(0, kind="loader", workers="worker 812 asleep", does="next(batches)")
    assert where(loader) == (
        "waits for a worker of its DataLoader (worker 812 asleep), at train.py:33: next(batches), in data"
    )


def test_one_of_whom_nothing_can_be_known() -> None:
    """It is alone on its host, or was stopped before it could tell where it is: the clock is all that there is."""
    for seconds, found in ((RUNNING_SECONDS - 1, None), (RUNNING_SECONDS, ("silent", (1,)))):
        assert verdict({0: waits(0), 1: Seen(silent=seconds, unknown=True)}) == found
