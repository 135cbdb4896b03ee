"""The tick loop, run by threads over an in-memory group."""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections.abc import Callable

import pytest

from ddpdebug.exchange import ticks as module
from ddpdebug.exchange.ticks import BATCH_ROWS, Alone, Exchange, Tick
from ddpdebug.isolation import background
from ddpdebug.schema.row import ROW_BYTES, Row, decode, encode

#: How long a thread may take for what takes it milliseconds: the machine may be busy.
_SECONDS = 60


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is left behind because its thread did not get the processor in time."""
    monkeypatch.setattr(module, "LEAVE_SECONDS", float(_SECONDS))
    monkeypatch.setattr(module, "_SILENCE_SECONDS", float(_SECONDS))


class Hub:
    """An all_gather between threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[bytes] = [b""] * size

    def member(self, rank: int) -> HubGroup:
        return HubGroup(self, rank)


class HubGroup:
    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank = hub, rank

    def gather(self, data: bytes) -> list[bytes]:
        self.hub.slots[self.rank] = data
        self.hub.barrier.wait(timeout=2 * _SECONDS)
        result = list(self.hub.slots)
        self.hub.barrier.wait(timeout=2 * _SECONDS)
        assert len({len(item) for item in result}) == 1, "the members sent different lengths"
        return result

    def close(self) -> None:
        self.hub.barrier.abort()

    def leave_word(self, text: str) -> None:
        pass

    def word(self) -> str | None:
        return None


class World:
    """Several exchanges in one process; each remembers what it heard."""

    def __init__(self, size: int) -> None:
        self.hubs = {0: Hub(size)}
        self.heard: list[list[Tick]] = [[] for _ in range(size)]
        self.lost: list[list[str]] = [[] for _ in range(size)]
        self.ranks = [
            Exchange(rank, size, self.connector(rank), self.listener(rank), self.lost[rank].append)
            for rank in range(size)
        ]
        self.lock = threading.Lock()

    def connector(self, rank: int) -> Callable[[int, tuple[int, ...]], module.Group]:
        def connect(generation: int, members: tuple[int, ...]) -> module.Group:
            if len(members) == 1:
                return Alone()
            with self.lock:
                hub = self.hubs.setdefault(generation, Hub(len(members)))
            return hub.member(members.index(rank))

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

    def rows(self, rank: int) -> list[tuple[int, int]]:
        return [(sender, decode(data).step) for tick in self.heard[rank] for sender, data in tick.rows]

    def close(self) -> list[bool]:
        done = [False] * len(self.ranks)

        def end(i: int) -> None:
            done[i] = self.ranks[i].close()

        threads = [threading.Thread(target=end, args=(i,)) for i in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return done


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _end(exchange: Exchange) -> None:
    """Wait for the end of a thread that has given up, so that closing has nothing left to wait for."""
    assert exchange._thread is not None
    exchange._thread.join(_SECONDS)
    assert exchange.close()


def row(rank: int, step: int) -> bytes:
    return encode(Row(rank=rank, step=step))


def test_every_rank_hears_all_rows_in_the_same_order() -> None:
    """All ranks can decide alike only if they see the same rows in the same order."""
    world = World(3).start()
    for step in range(200):
        for rank, exchange in enumerate(world.ranks):
            exchange.post(row(rank, step))
    assert all(world.close())
    assert world.rows(0) == world.rows(1) == world.rows(2)
    assert sorted(world.rows(0)) == [(rank, step) for rank in range(3) for step in range(200)]


def test_a_rank_without_news_does_not_hold_up_the_others() -> None:
    """Ranks that do not step take part in the ticks all the same."""
    world = World(2).start()
    for step in range(5):
        world.ranks[0].post(row(0, step))
    _until(lambda: len(world.rows(1)) >= 5)
    assert world.rows(1) == [(0, step) for step in range(5)]
    assert all(world.close())


def test_long_messages_arrive_whole_and_in_order() -> None:
    """A message larger than a chunk is sent over several ticks."""
    world = World(2).start()
    texts = [str(i) * 40_000 for i in range(4)] + [bytes(range(256)).hex() * 3000]
    for text in texts:
        world.ranks[1].say({"text": text})
    assert all(world.close())
    for heard in world.heard:
        assert [m["text"] for tick in heard for sender, m in tick.messages if sender == (1,)] == texts


def test_a_rank_that_leaves_early_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others learn of it in the same tick, make a smaller group and go on."""
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.2)
    world = World(3).start()
    world.ranks[2].post(row(2, 0))
    assert world.ranks[2].close(_SECONDS)
    monkeypatch.setattr(module, "LEAVE_SECONDS", float(_SECONDS))
    for rank in (0, 1):
        world.ranks[rank].post(row(rank, 1))
    _until(lambda: (1, 1) in world.rows(0))
    assert world.heard[0][-1].members == (0, 1)
    assert (2, 0) in world.rows(0)
    assert (1, 1) in world.rows(0)
    assert all(world.close())
    assert world.lost == [[], [], []]


def test_who_ends_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that ends while others train gets their ticks at once, not one for each time that they idle."""
    monkeypatch.setattr(module, "LEAVE_SECONDS", 1.0)
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)
    world = World(2).start()
    ended: list[bool] = []
    ending = threading.Thread(target=lambda: ended.append(world.ranks[1].close(_SECONDS)))
    ending.start()
    _until(lambda: world.ranks[0]._someone_leaves)
    monkeypatch.setattr(module, "IDLE_SECONDS", 10.0 * _SECONDS)
    ending.join()
    assert ended == [True]
    _until(lambda: world.heard[0][-1].members == (0,))
    assert world.ranks[0].close(_SECONDS)


def test_closing_does_not_wait_for_ranks_that_fell_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather without an answer is given up before the time for leaving is over."""
    monkeypatch.setattr(module, "_SILENCE_SECONDS", 0.1)
    world = World(2)
    world.ranks[0].start()  # the other never comes
    world.ranks[0].close(timeout=100 * _SECONDS)
    _end(world.ranks[0])
    assert len(world.lost[0]) == 1


def test_a_dead_group_ends_the_loop_and_is_reported_once() -> None:
    """Nothing of it reaches the threads that post."""
    world = World(2).start()
    world.hubs[0].barrier.abort()
    _until(lambda: all(world.lost))
    world.ranks[0].post(row(0, 0))
    world.ranks[0].say({"still": "alive"})
    for rank in world.ranks:
        _end(rank)
    assert [len(reasons) for reasons in world.lost] == [1, 1]


def test_closing_does_not_wait_for_a_group_that_never_connects() -> None:
    """A rank that nobody joins still ends within its time, and its thread ticks no more, whatever comes of it."""
    never, ticks, lost = threading.Event(), list[module.Tick](), list[str]()

    def connect(_generation: int, _members: tuple[int, ...]) -> module.Group:
        never.wait()
        return HubGroup(Hub(1), 0)

    exchange = Exchange(0, 1, connect, lambda tick: bool(ticks.append(tick)), lost.append)
    exchange.state = module.MEETING  # as of two ranks
    exchange.start()
    assert exchange.close(timeout=0.2)
    assert exchange.lost
    assert len(lost) == 1
    never.set()
    _until(lambda: "ddpdebug" not in background.names().values())
    assert ticks == []


def test_the_bytes_of_a_tick_do_not_depend_on_what_the_ranks_say_elsewhere() -> None:
    """A tick without payload is a header and a batch of rows."""
    sizes: list[int] = []

    class Measured(Alone):
        def gather(self, data: bytes) -> list[bytes]:
            sizes.append(len(data))
            return [data]

    exchange = Exchange(0, 1, lambda _g, _m: Measured(), lambda _tick: False, lambda _reason: None)
    exchange.start()
    exchange.post(row(0, 0))
    assert exchange.close()
    assert max(sizes) <= 64 + BATCH_ROWS * ROW_BYTES


def test_what_json_cannot_say_is_dropped_and_told_once() -> None:
    """A circle, an object whose text raises, keys of other types: none of them reaches who says it."""

    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    told: list[str] = []
    exchange = Exchange(0, 2, World(2).connector(0), lambda _: False, lambda _: None, lambda part, _: told.append(part))
    circle: dict[str, object] = {"kind": "fact"}
    circle["itself"] = circle
    assert not exchange.say(circle)
    assert not exchange.say({"kind": "fact", "value": Bad()})
    assert not exchange.say({"kind": "vote", "value": {(1, 2): 3}})
    assert exchange.say({"kind": "fact", "value": object()})
    assert told == ["message:fact", "message:vote"]


def test_a_tick_that_fails_does_not_end_the_comparison() -> None:
    """The other ranks wait for the next gather; the failure is told once."""
    world = World(2)
    told: list[tuple[str, str]] = []

    def fails(tick: Tick) -> bool:
        world.heard[0].append(tick)
        raise RuntimeError("broken")

    connect = world.connector(0)
    world.ranks[0] = Exchange(0, 2, connect, fails, world.lost[0].append, lambda *trouble: told.append(trouble))
    world.start()
    for step in range(20):
        for rank, exchange in enumerate(world.ranks):
            exchange.post(row(rank, step))
    assert all(world.close())
    assert len(world.rows(0)) == len(world.rows(1)) == 40
    assert told == [("tick", "RuntimeError: broken")]
    assert world.lost == [[], []]


def test_a_row_that_cannot_be_encoded_is_left_out() -> None:
    """The header counts the rows that are there."""
    world = World(2)
    told: list[str] = []
    world.ranks[0]._on_trouble = lambda part, message: told.append(part)

    def broken() -> bytes:
        raise RuntimeError("no row")

    world.start()
    for bad in (broken, lambda: b"short"):
        world.ranks[0].post(bad)
        world.ranks[0].post(row(0, 7))
    assert all(world.close())
    assert world.rows(1) == [(0, 7), (0, 7)]
    assert told == ["row"]


def test_a_message_that_cannot_be_read_does_not_take_the_next_ones_with_it() -> None:
    """It is dropped on all ranks alike."""
    world = World(2)
    for garbage in (b"\0\1\2", zlib.compress(b"[1, 2]"), zlib.compress(b"{"), zlib.compress(b'"text"')):
        world.ranks[1]._outbox += struct.pack("<I", len(garbage)) + garbage
    world.ranks[1].say({"text": "whole"})
    world.start()
    assert all(world.close())
    for heard in world.heard:
        assert [message for tick in heard for _, message in tick.messages] == [{"text": "whole"}]


def test_headers_that_cannot_be_true_end_it_without_a_huge_gather() -> None:
    """A rank whose memory is damaged must not make the others allocate what it says."""

    class Liar(Alone):
        def gather(self, data: bytes) -> list[bytes]:
            head = module._HEADER.pack(module.LAYOUT_VERSION, 0, 0, 0, 0, 1 << 60)
            return [head + data[len(head) :]]

    lost: list[str] = []
    exchange = Exchange(0, 1, lambda _g, _m: Liar(), lambda _tick: False, lost.append)
    exchange.start()
    _end(exchange)
    assert "a header that cannot be true" in lost[0]


@pytest.mark.parametrize("error", [SystemExit(1), MemoryError(), RuntimeError("boom")])
def test_who_gives_up_says_why(error: BaseException) -> None:
    """`state` and `reason` tell it on this rank, the word that it leaves tells the others; who is told may raise."""
    words: list[str] = []

    class Breaks(Alone):
        def leave_word(self, text: str) -> None:
            words.append(text)

    def lost(reason: str) -> None:
        raise RuntimeError(reason)

    exchange = Exchange(0, 2, lambda _g, _m: Breaks(), lambda _tick: False, lost)
    exchange._message = lambda: (_ for _ in ()).throw(error)  # type: ignore[method-assign]
    assert exchange.state == "meeting"
    exchange.start()
    _end(exchange)
    assert exchange.state == "lost"
    assert exchange.reason.startswith(type(error).__name__)
    assert words == [f"rank 0 has given up: {exchange.reason}"]
    exchange.post(row(0, 0))
    assert not exchange.say({})


def test_the_state_follows_the_group() -> None:
    """From the meeting to the end."""
    world = World(2)
    assert [rank.state for rank in world.ranks] == ["meeting", "meeting"]
    assert Exchange(0, 1, lambda _g, _m: Alone(), lambda _: False, lambda _: None).state == "alone"
    world.start()
    _until(lambda: world.heard[0] and world.heard[1])
    assert [rank.state for rank in world.ranks] == ["comparing", "comparing"]
    assert all(world.close())
    assert [rank.state for rank in world.ranks] == ["ended", "ended"]


def test_who_has_met_nobody_keeps_the_newest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that attaches late finds what is left; after `MEET_SECONDS` the rest is given up, with names."""
    monkeypatch.setattr(module, "_MAX_WAITING", 4)
    lost: list[str] = []
    exchange = Exchange(0, 3, lambda _g, _m: Alone(), lambda _tick: False, lost.append)
    for step in range(6):
        exchange.post(row(0, step))
    assert [decode(bytes(data)).step for data in exchange._rows] == [2, 3, 4, 5]  # type: ignore[arg-type]
    assert (exchange.state, lost) == ("meeting", [])
    monkeypatch.setattr(module, "MEET_SECONDS", 0.0)
    exchange.missing = (1, 2)
    exchange.post(row(0, 6))
    assert (exchange.state, len(exchange._rows)) == ("lost", 0)
    assert lost[0].startswith("no word from ranks 1-2")


def test_a_rank_that_is_behind_is_told_by_how_many_steps() -> None:
    """As soon as all have said twice how far they are; one that is about to leave is not waited for."""
    world = World(3).start()
    for rank, reached in enumerate((50, 10, 7)):
        world.ranks[rank].progress = reached
    _until(lambda: world.heard[0] and world.heard[0][-1].apart == 43)
    assert world.heard[0][0].apart == 0  # nobody knows whether they said it at the same moment
    leaving = threading.Thread(target=world.ranks[2].close)
    leaving.start()
    _until(lambda: world.heard[0][-1].apart == 40)
    assert all(world.close())
    leaving.join(_SECONDS)


def test_ranks_that_step_together_are_not_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast they are, and whenever their threads tick: one may only have begun the step that another ended."""
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.001)
    world = World(3).start()
    together, last = threading.Barrier(3), list[int]()

    def train(rank: int) -> None:
        for step in range(100_000):
            if rank == 0 and len(world.heard[0]) > 20 and not last:
                last.append(step)
            together.wait(_SECONDS)
            if last and last[0] <= step:
                return
            world.ranks[rank].progress = step + 1
            time.sleep(0.0005 * rank)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _SECONDS)
    assert all(world.close())
    assert {tick.apart for tick in world.heard[0]} == {0}
    assert len(world.heard[0]) > 20


def _together(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_ranks_that_part_have_heard_everything_and_go_on_alone() -> None:
    """Then each hears itself only, until they meet again."""
    world = World(3).start()
    for rank, exchange in enumerate(world.ranks):
        exchange.post(row(rank, rank))
        exchange.say({"kind": "last", "rank": rank})
    _together([exchange.part for exchange in world.ranks])
    assert [exchange.apart for exchange in world.ranks] == [True] * 3
    assert [sorted(world.rows(rank)) for rank in range(3)] == [[(0, 0), (1, 1), (2, 2)]] * 3
    assert all(len({ranks for tick in heard for ranks, _ in tick.messages}) == 3 for heard in world.heard)
    for rank, exchange in enumerate(world.ranks):
        exchange.say({"kind": "alone"})
        exchange.post(row(rank, 7))  # last: where it has been heard, so has the message
        _until(lambda rank=rank: (rank, 7) in world.rows(rank))
        assert world.heard[rank][-1].members == (rank,)
    assert all(exchange.rejoin() for exchange in world.ranks)
    for rank, exchange in enumerate(world.ranks):
        exchange.say({"kind": "again"})  # it may be alone yet, and still all hear it
        exchange.post(row(rank, 8))
    for rank in range(3):
        _until(lambda rank=rank: sorted(sender for sender, step in world.rows(rank) if step == 8) == [0, 1, 2])
        heard = sorted((ranks, message["kind"]) for tick in world.heard[rank] for ranks, message in tick.messages)
        assert [entry for entry in heard if entry[1] == "again"] == [((sender,), "again") for sender in range(3)]
        assert [entry for entry in heard if entry[1] == "alone"] == [((rank,), "alone")]
    assert [exchange.state for exchange in world.ranks] == ["comparing"] * 3
    assert all(world.close())
    assert world.lost == [[], [], []]


def test_a_rank_that_parts_leaves_those_behind_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on without it, and hear what it had to say."""
    world = World(3).start()
    world.ranks[0].post(row(0, 0))
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.1)
    world.ranks[0].part()
    _until(lambda: world.ranks[0].apart)
    monkeypatch.setattr(module, "LEAVE_SECONDS", float(_SECONDS))
    world.ranks[1].post(row(1, 1))
    _until(lambda: (1, 1) in world.rows(2))
    assert (0, 0) in world.rows(1)
    assert world.heard[1][-1].members == world.heard[2][-1].members == (1, 2)
    assert all(world.close())


def test_ranks_that_have_not_met_part_without_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process group ends that they would have met in; they meet in the next one."""
    world, ends = World(2), threading.Event()

    def connect(rank: int) -> Callable[[int, tuple[int, ...]], module.Group]:
        usual = world.connector(rank)

        def meet(generation: int, members: tuple[int, ...]) -> module.Group:
            if len(members) > 1 and not ends.is_set():
                _until(lambda: world.ranks[rank].impatient)
                raise ConnectionError("the process group has ended")
            return usual(generation, members)

        return meet

    for rank, exchange in enumerate(world.ranks):
        monkeypatch.setattr(exchange, "_connect", connect(rank))
    world.start()
    _together([lambda exchange=exchange: exchange.part(patient=False) for exchange in world.ranks])
    _until(lambda: all(exchange.apart for exchange in world.ranks))
    ends.set()
    for rank, exchange in enumerate(world.ranks):
        assert exchange.rejoin()
        exchange.post(row(rank, 0))
    assert all(world.close())
    assert world.rows(0) == world.rows(1) == [(0, 0), (1, 0)]
    assert world.lost == [[], []]
