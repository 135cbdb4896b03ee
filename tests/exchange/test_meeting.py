"""The ranks meet in a store that may be older than they are. Threads stand for ranks."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from ddpdebug.exchange import meeting
from ddpdebug.exchange.meeting import RollCall, Waiting, disagreement
from ddpdebug.torch_internals import own_connection

#: How long a thread may take for what takes it milliseconds: the machine may be busy.
_SECONDS = 60

_SAME = {"versions of ddpdebug": "0.2.0", "~budget": 0.01}


class Counting:
    """Counts a store's operations."""

    def __init__(self, store: Any) -> None:
        self._store, self.calls, self._lock = store, Counter[str](), threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            with self._lock:
                self.calls[name] += 1
            return getattr(self._store, name)(*args)

        return call


class Rank(threading.Thread):
    """One rank that meets the others; `result` is its prefix or what it was told."""

    def __init__(self, store: Any, rank: int, world: int, identity: Mapping[str, Any] = _SAME, number: int = 0) -> None:
        super().__init__(daemon=True)
        self.waiting, self.stop, self.result = Waiting(), "", ""
        self.roll = RollCall(store, number, rank, world, identity, lambda: self.stop or None, self.waiting)

    def run(self) -> None:
        try:
            self.result = self.roll.meet()
        except ConnectionError as error:
            self.result = str(error)

    def end(self, reason: str = "killed") -> None:
        self.stop = reason
        self.join(_SECONDS)
        assert not self.is_alive()


def _meet(store: Any, world: int, identities: Mapping[int, Mapping[str, Any]] | None = None) -> list[Rank]:
    ranks = [Rank(store, rank, world, (identities or {}).get(rank, _SAME)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(_SECONDS)
    return ranks


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """The stores that come with torch."""
    if request.param == "hash":
        yield HashStore()
    elif request.param == "file":
        yield FileStore(str(tmp_path / "store"), 8)
    else:
        server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
        yield own_connection(PrefixStore("default_pg", server))
        del server


def test_all_ranks_come_to_the_same_keys(store: Any) -> None:
    """And to other ones at each meeting: what an earlier one left is not found."""
    prefixes = []
    for _ in range(3):
        ranks = _meet(store, 3)
        assert len({rank.result for rank in ranks}) == 1
        assert ranks[0].result.startswith("ddpdebug/meeting/0/")
        prefixes.append(ranks[0].result)
    assert len(set(prefixes)) == 3
    assert [rank.roll.settings for rank in ranks] == [{"~budget": 0.01}] * 3


def test_a_smaller_world_meets_where_a_larger_one_has_died() -> None:
    """Membership may change between two attempts; ranks of the earlier one are not waited for, and not invited."""
    store = HashStore()
    dead = [Rank(store, rank, 3) for rank in range(3) if rank != 2]
    for rank in dead:
        rank.start()
    _until(lambda: dead[0].waiting.missing == (2,))
    for rank in dead:
        rank.end()
    ranks = _meet(store, 2)
    assert ranks[0].result == ranks[1].result
    assert [rank.result for rank in dead] == ["killed", "killed"]


def test_a_rank_that_died_while_meeting_is_replaced() -> None:
    """Its place in the queue is still there; whoever comes after it under the same number is meant."""
    store = HashStore()
    dead = Rank(store, 1, 2)
    dead.start()
    _until(lambda: store.check(["ddpdebug/meeting/0/arrival/1"]))
    dead.end()
    first = Rank(store, 0, 2)
    first.start()
    _until(lambda: store.check([f"ddpdebug/meeting/0/answer/{dead.roll._nonce}"]))
    second = Rank(store, 1, 2)
    second.start()
    for rank in (first, second):
        rank.join(_SECONDS)
    assert first.result == second.result != ""


def test_a_dying_rank_0_gives_way_to_the_next_attempt() -> None:
    """Its thread still polls when the next attempt's ranks have come; it must not lead them to itself."""
    store = HashStore()
    old = Rank(store, 0, 2)
    old.start()
    _until(lambda: old.waiting.missing == (1,))
    new = Rank(store, 0, 2)
    new.start()
    _until(lambda: not old.is_alive())
    other = Rank(store, 1, 2)
    other.start()
    for rank in (new, other):
        rank.join(_SECONDS)
    assert "has taken the place of rank 0" in old.result
    assert new.result == other.result != old.result


def test_an_attempt_is_not_answered_by_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the launcher counts them, a rank 0 of attempt 0 that hangs on leaves rank 1 of attempt 1 alone."""
    store = HashStore()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    old = Rank(store, 0, 2)
    old.start()
    _until(lambda: old.waiting.missing == (1,))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    other = Rank(store, 1, 2)
    other.start()
    time.sleep(0.3)
    assert (old.result, other.result) == ("", "")
    new = Rank(store, 0, 2)
    new.start()
    for rank in (new, other, old):
        rank.join(_SECONDS)
    assert new.result == other.result != old.result
    assert "has taken the place of rank 0" in old.result


def test_a_rank_that_comes_late_is_waited_for_and_named() -> None:
    """`missing` says who has not come; the others wait without end, and cheaply."""
    store = HashStore()
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    for rank in ranks[:2]:
        rank.start()
    _until(lambda: ranks[0].waiting.missing == (2,) and ranks[1].waiting.missing == (0,))
    time.sleep(0.5)
    ranks[2].start()
    for rank in ranks:
        rank.join(_SECONDS)
    assert len({rank.result for rank in ranks}) == 1


def test_giving_up_says_why() -> None:
    """The reason of whoever asks goes through to the exchange."""
    rank = Rank(HashStore(), 1, 2)
    rank.start()
    rank.end("the job is over")
    assert rank.result == "the job is over"


def test_who_withdraws_takes_all_or_none_with_it() -> None:
    """Its process group ends while the ranks meet: either all go on with it, or the others know that it has gone."""
    for pause in (0.0, 0.005, 0.01, 0.015, 0.02, 0.03):
        store = HashStore()
        ranks = [Rank(store, rank, 2) for rank in range(2)]
        for rank in ranks:
            rank.start()
        time.sleep(pause)
        ranks[1].end("group has ended")
        if ranks[1].result != "group has ended":
            ranks[0].join(_SECONDS)
            assert ranks[0].result == ranks[1].result
            continue
        next_one = Rank(store, 1, 2)
        next_one.start()
        for rank in (ranks[0], next_one):
            rank.join(_SECONDS)
        assert ranks[0].result == next_one.result != ""


def test_two_monitors_of_a_process_do_not_meet_each_other() -> None:
    """The ranks' n-th monitors belong together."""
    store = HashStore()
    ranks = [Rank(store, rank, 2, number=number) for number in (0, 1) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(_SECONDS)
    assert ranks[0].result == ranks[1].result != ranks[2].result == ranks[3].result


def test_ranks_that_differ_are_named_before_anything_else_happens() -> None:
    """All are told the same; the smaller party comes first."""
    text = (
        "the ranks have different versions of ddpdebug (rank 1 0.3.0, ranks 0,2 0.2.0): install the same on all nodes"
    )
    ranks = _meet(HashStore(), 3, {1: {**_SAME, "versions of ddpdebug": "0.3.0"}})
    assert [rank.result for rank in ranks] == [text] * 3


@pytest.mark.parametrize(
    "identities, says",
    [
        ({0: {"a": 1}, 1: {"a": 1}}, None),
        ({0: {"~budget": 1}, 1: {"~budget": 2}}, None),
        (
            {0: {"settings of guard": "off"}, 1: {"settings of guard": "stop"}},
            "the ranks have different settings of guard (rank 0 off, rank 1 stop): give all ranks the same",
        ),
        (
            {0: {}, 1: {"layouts of rows": "x"}},
            "the ranks have different layouts of rows (rank 0 null, rank 1 x): install the same on all nodes",
        ),
    ],
)
def test_what_the_ranks_must_share(identities: Mapping[int, Mapping[str, Any]], says: str | None) -> None:
    """A name that only another version knows is a difference too."""
    assert disagreement(identities) == says


@pytest.mark.parametrize("old", [0, 1])
def test_version_0_1_0_is_recognised(old: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves a key and polls for the others' for ever, which never come: it hangs in its thread, not in gloo."""
    monkeypatch.setattr(meeting, "_OLD_SECONDS", 0.05)
    store = HashStore()
    store.set(f"ddpdebug/0/group/0/here/{old}", "1")
    rank = Rank(store, 1 - old, 2)
    rank.start()
    rank.join(_SECONDS)
    assert f"rank {old} 0.1.0" in rank.result
    assert not store.check([f"ddpdebug/0/group/0/here/{1 - old}"])


@pytest.mark.parametrize("world", [4, 16])
def test_the_cost_grows_with_the_ranks_and_not_with_their_square(world: int) -> None:
    """Operations on the job's store, without those of polls."""
    store = Counting(HashStore())
    _meet(store, world)
    writes = store.calls["set"]
    assert writes <= world + 3
    assert store.calls["get"] <= 2 * world + 2 * store.calls["check"]
    # every poll of a rank looks at one or two keys, whatever the size of the world
    assert store.calls["wait"] == 0


def test_rank_0_reads_and_answers_the_others_many_at_a_time() -> None:
    """Of thousands of ranks it would take longer than all else; a ticket that is not signed is read when it is."""
    world, store = 700, Counting(HashStore())
    base = "ddpdebug/meeting/0"
    arrivals = [{"rank": rank, "world": world, "attempt": "", "nonce": f"n{rank}"} for rank in range(1, world)]
    for number, arrival in enumerate(arrivals, 1):
        if number != 300:
            store.set(f"{base}/arrival/{number}", json.dumps({**arrival, "identity": _SAME}))
    store.add(f"{base}/tickets", world - 1)
    rank = Rank(store, 0, world)
    rank.start()
    _until(lambda: rank.waiting.missing == (300,))
    store.calls.clear()
    store.set(f"{base}/arrival/300", json.dumps({**arrivals[299], "identity": _SAME}))
    _until(lambda: store.check([f"{base}/answer/n{world - 1}"]))
    assert store.calls["multi_set"] == 3
    answers = [json.loads(store.get(f"{base}/answer/n{each}")) for each in range(1, world)]
    assert len({answer["token"] for answer in answers}) == 1
    store.add(f"{base}/{answers[0]['token']}/here", world - 1)
    rank.join(_SECONDS)
    assert rank.result == f"{base}/{answers[0]['token']}"
    assert sorted(rank.roll.identities) == list(range(world))


def test_waiting_costs_a_look_a_quarter_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is late for long must not starve the job's store."""
    now, looks = [0.0], Counter[int]()

    class Clock:
        """Goes on while somebody sleeps, and only then."""

        @staticmethod
        def monotonic() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            looks[int(now[0])] += sum(store.calls.values())
            store.calls.clear()
            now[0] += seconds

    monkeypatch.setattr(meeting, "time", Clock)
    store = Counting(HashStore())
    with pytest.raises(ConnectionError, match="over"):
        RollCall(store, 1, 1, 8, _SAME, lambda: "it is over" if now[0] > 20 else None).meet()
    assert {second for second, calls in looks.items() if calls > 6} == {0}
    assert all(looks[second] >= 3 for second in range(1, 20))


def test_a_rank_that_has_its_answer_asks_for_one_key_and_hears_of_another_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So all wait for the slowest; a process that comes in rank 0's place does not know whom that one has answered."""
    now, store = [0.0], Counting(HashStore())

    class Clock:
        """Goes on while somebody sleeps, and only then."""

        @staticmethod
        def monotonic() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            token = "a" if now[0] < 20 else "b"
            key = f"ddpdebug/meeting/1/answer/{roll._nonce}"
            store._store.set(key, json.dumps({"token": token, "settings": {}}))
            now[0] += seconds

    monkeypatch.setattr(meeting, "time", Clock)
    roll = RollCall(store, 1, 1, 8, _SAME, lambda: "it is over" if now[0] > 40 else None)
    with pytest.raises(ConnectionError, match="over"):
        roll.meet()
    assert int(store.add("ddpdebug/meeting/1/b/here", 0)) == 1
    assert store.calls.total() <= 1.3 * 4 * 40 + 20


def test_thousands_that_wait_ask_seldom_and_rank_0_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once they would ask the store for seconds; and all wait for rank 0, which is one."""
    now = [0.0]

    class Clock:
        """Goes on while somebody sleeps, and only then."""

        @staticmethod
        def monotonic() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            now[0] += seconds

    monkeypatch.setattr(meeting, "time", Clock)
    counts = {}
    for rank in (0, 1):
        now[0], store = 0.0, Counting(HashStore())
        with pytest.raises(ConnectionError, match="over"):
            RollCall(store, 1, rank, 8192, _SAME, lambda: "it is over" if now[0] > 20 else None).meet()
        counts[rank] = store.calls.total()
    assert counts[1] <= 10
    assert counts[0] >= 60


def test_a_smaller_group_meets_again() -> None:
    """Those who stay count themselves in under the same token."""
    store = HashStore()
    ranks = _meet(store, 3)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda roll=rank.roll: found.append(roll.meet_again(1, 2))) for rank in ranks[:2]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
    assert found == [f"{ranks[0].result}/1"] * 2
