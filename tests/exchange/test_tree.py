"""The tree of small groups, and the tick loop over it, run by threads."""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Callable

import pytest

from ddpdebug.exchange import ticks
from ddpdebug.exchange.partial import Partial
from ddpdebug.exchange.ticks import Tick
from ddpdebug.exchange.tree import Circle, Tree, circles
from ddpdebug.exchange.tree_ticks import TreeExchange
from ddpdebug.schema.row import Row, decode, encode

_SECONDS = 60.0
_WORLDS = (17, 20, 64, 100, 1000, 1024)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is left behind because its thread did not get the processor in time."""
    monkeypatch.setattr(ticks, "LEAVE_SECONDS", _SECONDS)
    monkeypatch.setattr(ticks, "_SILENCE_SECONDS", _SECONDS)


@pytest.mark.parametrize("world", _WORLDS)
@pytest.mark.parametrize("neighbours", [0, 2, 4, 8])
def test_the_tree_reaches_everybody_by_few_connections(world: int, neighbours: int) -> None:
    """Each rank but the first has one group in which it is led; none has more than 32 connections."""
    led = []
    for rank in range(world):
        own = circles(range(world), rank, neighbours)
        assert sum(len(circle.members) - 1 for circle in own) <= 32
        above = [circle for circle in own if circle.members[0] != rank]
        assert above == own[len(own) - len(above) :]
        assert len(above) == (rank != 0)
        led += above
        size = neighbours or 8
        assert all(circle.members[-1] - circle.members[0] < size for circle in own if circle.level == 0)
    assert len(led) == world - 1


def test_ranks_that_have_left_are_in_no_group() -> None:
    """The others are as near to each other as before."""
    members = [rank for rank in range(40) if rank not in {0, 3, 17}]
    found = {circle for rank in members for circle in circles(members, rank, 4)}
    assert {rank for circle in found for rank in circle.members} == set(members)
    assert not any(rank in circle.members for circle in found for rank in (0, 3, 17))


class Room:
    """A small group of threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[bytes] = [b""] * size
        self.told = b""

    def member(self, place: int) -> Member:
        return Member(self, place)


class Member:
    def __init__(self, room: Room, place: int) -> None:
        self.room, self.place = room, place

    def collect(self, data: bytes) -> list[bytes] | None:
        self.room.given[self.place] = data
        self.room.barrier.wait(2 * _SECONDS)
        found = list(self.room.given)
        self.room.barrier.wait(2 * _SECONDS)
        return found if self.place == 0 else None

    def spread(self, data: bytes | None) -> bytes:
        if self.place == 0:
            assert data is not None
            self.room.told = data
        self.room.barrier.wait(2 * _SECONDS)
        told = self.room.told
        self.room.barrier.wait(2 * _SECONDS)
        return told

    def close(self) -> None:
        self.room.barrier.abort()


class NoWords:
    def leave_word(self, text: str) -> None:
        del text

    def word(self) -> str | None:
        return None


class World:
    """Exchanges of many ranks in one process; each remembers what it heard."""

    def __init__(self, size: int) -> None:
        self.rooms: dict[tuple[int, Circle], Room] = {}
        self.lock = threading.Lock()
        self.trees: list[Tree] = []
        self.heard: list[list[Tick]] = [[] for _ in range(size)]
        self.lost: list[list[str]] = [[] for _ in range(size)]
        self.ranks = [
            TreeExchange(rank, size, self.connector(rank), self.listener(rank), self.lost[rank].append)
            for rank in range(size)
        ]

    def connector(self, rank: int) -> Callable[[int, tuple[int, ...]], Tree]:
        def connect(generation: int, members: tuple[int, ...]) -> Tree:
            def enter(circle: Circle) -> Member:
                with self.lock:
                    room = self.rooms.setdefault((generation, circle), Room(len(circle.members)))
                return room.member(circle.members.index(rank))

            tree = Tree(members, rank, enter, NoWords(), 4)
            self.trees.append(tree)
            return tree

        return connect

    def listener(self, rank: int) -> Callable[[Tick], bool]:
        def hear(tick: Tick) -> bool:
            self.heard[rank].append(tick)
            return False

        return hear

    def start(self) -> World:
        for rank in self.ranks:
            rank.start()
        return self

    def close(self) -> list[bool]:
        done = [False] * len(self.ranks)

        def end(place: int) -> None:
            done[place] = self.ranks[place].close()

        threads = [threading.Thread(target=end, args=(place,)) for place in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return done

    def said(self, rank: int) -> list[tuple[tuple[int, ...], object]]:
        return [(ranks, message["text"]) for tick in self.heard[rank] for ranks, message in tick.messages]

    def reported(self, rank: int) -> list[tuple[tuple[int, ...], object]]:
        return [(ranks, message["text"]) for tick in self.heard[rank] for ranks, message in tick.reports]


def _row(rank: int, step: int, **fields: object) -> bytes:
    return encode(Row(rank=rank, step=step, params_after_digest=step + 1, backward_seconds=0.0, **fields))  # type: ignore[arg-type]


def test_every_rank_hears_the_same() -> None:
    """Of each step all ranks, and the row of the one that is first in something."""
    world = World(22).start()
    for step in range(30):
        for rank, exchange in enumerate(world.ranks):
            exchange.progress = step + 1
            exchange.post(_row(rank, step, step_seconds=0.2 if rank == 13 else 0.1))
    assert all(world.close())
    assert world.lost == [[] for _ in range(22)]
    taken = [
        [(key, part.classes, part.rows()) for tick in heard for key, part in tick.parts.items()]
        for heard in world.heard
    ]
    assert all(one == taken[0] for one in taken)
    ranks, kept = dict[int, int](), dict[int, set[int]]()
    for key, _, rows in taken[0]:
        kept.setdefault(key[1], set()).update(rows)
    for tick in world.heard[0]:
        for key, part in tick.parts.items():
            ranks[key[1]] = ranks.get(key[1], 0) | part.ranks
    assert ranks == dict.fromkeys(range(30), (1 << 22) - 1)
    assert all({0, 13} <= rows for rows in kept.values())


def test_equal_messages_come_as_one_and_reports_to_the_first_rank_alone() -> None:
    """Whoever says them is known."""
    world = World(20)
    for rank, exchange in enumerate(world.ranks):
        exchange.say({"text": "of all"})
        exchange.say({"text": f"report {rank % 2}"}, report=True)
    world.ranks[7].say({"text": "of one"})
    world.start()
    assert all(world.close())
    assert all(world.said(rank) == world.said(0) for rank in range(20))
    assert [ranks for ranks, text in world.said(0) if text == "of all"] == [tuple(range(20))]
    assert ((7,), "of one") in world.said(0)
    assert sorted(world.reported(0), key=str) == [
        (tuple(range(0, 20, 2)), "report 0"),
        (tuple(range(1, 20, 2)), "report 1"),
    ]
    assert not any(world.reported(rank) for rank in range(1, 20))


def test_long_messages_wait_for_the_next_tick_and_keep_their_order() -> None:
    """One that is longer than a tick takes is sent all the same."""
    texts = [f"{number}" * 50_000 + bytes(range(256)).hex() for number in range(5)]
    texts.append("".join(f"{number:x}" for number in range(200_000)))
    world = World(17)
    for text in texts:
        world.ranks[16].say({"text": text})
    world.start()
    assert all(world.close())
    assert [text for _, text in world.said(3)] == texts


def test_a_rank_that_leaves_early_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one that leads all: the next one hears the reports from then on."""
    monkeypatch.setattr(ticks, "LEAVE_SECONDS", 0.2)
    world = World(18).start()
    assert world.ranks[0].close(_SECONDS)
    monkeypatch.setattr(ticks, "LEAVE_SECONDS", _SECONDS)
    for rank in range(1, 18):
        world.ranks[rank].progress = 1
        world.ranks[rank].post(_row(rank, 0))
        world.ranks[rank].say({"text": "later"}, report=True)
    assert all(world.close()[1:])
    assert world.heard[1][-1].members == tuple(range(1, 18))
    told = [(rank, text) for ranks, text in world.reported(1) for rank in ranks]  # in one tick, or in several
    assert sorted(told) == [(rank, "later") for rank in range(1, 18)]
    assert world.lost == [[] for _ in range(18)]


def test_the_last_rank_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all others have left it still hears itself."""
    monkeypatch.setattr(ticks, "LEAVE_SECONDS", 0.2)
    world = World(17).start()
    threads = [threading.Thread(target=exchange.close, args=(_SECONDS,)) for exchange in world.ranks[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(ticks, "LEAVE_SECONDS", _SECONDS)
    world.ranks[0].say({"text": "alone"}, report=True)
    deadline = time.monotonic() + _SECONDS
    while world.reported(0) != [((0,), "alone")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert world.ranks[0].close(_SECONDS)
    assert world.lost == [[] for _ in range(17)]


def test_a_group_that_dies_ends_the_comparison_on_all_ranks() -> None:
    """Its members hear of it, let go of their other groups, and so it goes up and down the tree."""
    world = World(20).start()
    deadline = time.monotonic() + _SECONDS
    while not world.heard[19]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    world.rooms[0, circles(range(20), 19, 4)[0]].barrier.abort()
    while not all(world.lost):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [len(reasons) for reasons in world.lost] == [1] * 20
    for exchange in world.ranks:
        assert exchange._thread is not None
        exchange._thread.join(_SECONDS)


def test_what_cannot_be_read_ends_the_comparison() -> None:
    """A rank whose memory is damaged sends no partial."""
    given = b"\0" * 7

    class Liar(Member):
        def collect(self, data: bytes) -> list[bytes] | None:
            del data
            return [b"", given]

    tree = Tree((0, 1), 0, lambda _: Liar(Room(2), 0), NoWords())
    with pytest.raises(ValueError, match="no partial"):
        tree.merge(Partial())
    given = zlib.compress(b"\0" * 7)
    with pytest.raises(ValueError, match="ends too early"):
        tree.merge(Partial())


def test_rows_are_encoded_where_they_are_sent() -> None:
    """One that cannot be is left out; the others go on."""
    world = World(17)
    told: list[str] = []
    world.ranks[4]._on_trouble = lambda part, _: told.append(part)
    world.ranks[4].post(lambda: b"short")
    for rank, exchange in enumerate(world.ranks):
        exchange.post(_row(rank, 3))
    world.start()
    assert all(world.close())
    parts = [part for tick in world.heard[9] for part in tick.parts.values()]
    ranks = 0
    for part in parts:
        ranks |= part.ranks
        assert all(decode(data).step == 3 for data in part.rows().values())
    assert (ranks, told) == ((1 << 17) - 1, ["row"])


def test_what_all_have_to_say_is_bounded_whatever_their_number() -> None:
    """Each has less to say in a tick; long messages wait for their turn, those of neighbours together, and all come."""
    world, sizes = 8192, list[int]()
    ranks = [0, 1, 63, 64, 5000, 8191]
    exchanges = [TreeExchange(rank, world, lambda *_: None, lambda _: False, lambda _: None) for rank in ranks]
    long = [bytes([n % 251 for n in range(5000)]) * 20, b"short" * 20]
    for rank, exchange in zip(ranks, exchanges, strict=True):
        assert all(exchange._put(text + bytes([rank % 7]), report=True) for text in long)
    came: list[list[int]] = [[] for _ in ranks]
    for tick in range(200):
        for number, exchange in enumerate(exchanges):
            exchange.ticks = tick
            own = exchange._own()
            came[number] += [tick] * len(own.reports)
            sizes.append(sum(len(text) for _, text in own.reports))
            assert bool(own.more) == bool(exchange._said)
    assert all(len(ticks_) == 2 for ticks_ in came)  # nothing is lost
    assert came[0] == came[1] == came[2]
    assert len({ticks_[0] for ticks_ in came}) == 4
    assert sum(map(bool, sizes)) < 3 * len(ranks)


def test_a_row_of_another_rank_is_not_sent() -> None:
    """It would be taken for that rank's."""
    told: list[str] = []
    exchange = TreeExchange(
        3, 80, lambda *_: None, lambda _: False, lambda _: None, lambda part, text: told.append(text)
    )
    exchange.post(encode(Row(rank=4, step=1)))
    exchange.post(encode(Row(rank=3, step=1)))
    ((_, part),) = exchange._own().steps.items()
    assert (part.ranks, told) == (1 << 3, ["it says that it is of rank 4"])


class NeverWaits(queue.Queue[None]):
    """A queue that nobody may wait at."""

    def get(self, block: bool = True, timeout: float | None = None) -> None:
        """Take what is there."""
        del timeout
        assert not block, "it waits"
        super().get(block=False)


def test_what_a_rank_has_to_say_does_not_wait_and_is_dropped_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes with the next tick, which comes at once; after the comparison there is nobody to hear it."""
    exchange = TreeExchange(0, 100, lambda *_: None, lambda _: False, lambda _: None)
    monkeypatch.setattr(exchange, "_wake", NeverWaits())
    assert exchange.say({"kind": "fact"})
    exchange._idle()
    exchange.lose("over")
    assert not exchange._said
