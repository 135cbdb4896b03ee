"""The look of a rank at itself: threads in known places, with a record of collectives that is made by hand."""

from __future__ import annotations

import datetime
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist
from machine import until

from ddpdebug.progress import kernel
from ddpdebug.progress.watcher import NoNotes, Watcher, _states
from ddpdebug.schema.progress import Call, Noted, RankProgress

pytestmark = pytest.mark.timeout(300)

#: Seconds in one place from which on a rank counts as waiting, here.
WAIT_SECONDS = 0.4


@dataclass
class Entry:
    group: str = "0"
    number: int = 6
    operation: str = "all_reduce"
    shapes: tuple[str, ...] = ("float32 [8]",)
    is_done: bool = False
    point_to_point: bool = False


@dataclass
class Record:
    """A record of collectives as torch's is."""

    known: dict[str, tuple[int, int]] | None = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    meetings = ("_store_based_barrier",)
    is_counted = has_messages = False
    exact: int = 0
    read: int = 0

    def entered(self) -> dict[str, int]:
        return {group: entered for group, (entered, _) in (self.known or {}).items()}

    def counts(self, *, exact: bool = False) -> dict[str, tuple[int, int]] | None:
        self.exact += exact
        self.read += 1
        return self.known

    def newest(self) -> list[Entry]:
        return self.entries


@contextmanager
def watched(
    function: Callable[[], object], record: Record | None = None, workers: tuple[int, ...] = (), **more
) -> Iterator[Watcher]:
    """Yield a watcher of a thread that runs a function."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    yield Watcher(
        1,
        record or Record(),
        members=lambda: {"0": (0, 1), "1": (0, 1, 2, 3)},
        thread=lambda: thread.ident or 0,
        step=lambda: 7,
        workers=lambda: workers,
        **more,
    )


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after a shorter time than a rank does."""
    monkeypatch.setattr("ddpdebug.progress.watcher.WAIT_SECONDS", WAIT_SECONDS)


def looks(watcher: Watcher, condition: Callable[[RankProgress], bool], seconds: float = 120.0) -> RankProgress:
    """Look about as often as the background thread does until something holds, and return that look."""
    seen: list[RankProgress] = []

    def look() -> bool:
        seen.append(watcher.look())
        return condition(seen[-1])

    assert until(look, seconds, pause=0.15), seen[-1]
    return seen[-1]


def stands_for(seconds: float) -> Callable[[RankProgress], bool]:
    return lambda look: look.same >= seconds


def blocked() -> None:
    threading.Event().wait(3600)


def test_the_record_is_not_read_while_the_training_goes_on() -> None:
    """Torch reads its tables without a lock: a first collective at that moment ends the process."""
    record = Record({"0": (1, 1)})
    with watched(blocked, record) as watcher:
        for number in range(2, 20):
            record.known = {"0": (number, number)}
            assert watcher.look().entered == {"0": number}
        assert not record.read
        looks(watcher, stands_for(2 * WAIT_SECONDS))
        assert record.read


def test_the_record_is_read_ever_more_seldom_where_a_group_has_issued_nothing() -> None:
    """Its first collective may come at any moment, unless the thread stands in one that ranks make together."""
    record = Record({"0": (6, 6), "new": (0, 0)})
    with watched(blocked, record) as watcher:
        looks(watcher, stands_for(10 * WAIT_SECONDS))
        assert 2 <= record.read <= 8  # at 1, 2, 4 and 8 times the wait, then also exactly
        record.known, before = {"0": (6, 6), "new": (1, 1)}, record.read
        looks(watcher, stands_for(10 * WAIT_SECONDS))
        assert record.read - before > 15


def test_a_collective_that_ends_is_seen_by_the_record() -> None:
    """The thread stays where it is, and the groups have counted nothing new."""
    record = Record({"0": (6, 5)})
    with watched(blocked, record) as watcher:
        looks(watcher, stands_for(2 * WAIT_SECONDS))
        record.known = {"0": (6, 6)}
        looks(watcher, lambda look: look.same < WAIT_SECONDS)
        looks(watcher, stands_for(2 * WAIT_SECONDS))


def test_a_thread_that_waits_for_a_lock() -> None:
    """Nothing moves, and it waits for no other rank, whatever collectives are open."""
    record = Record({"0": (6, 5)}, [Entry()])
    with watched(blocked, record) as watcher:
        look = looks(watcher, stands_for(3 * WAIT_SECONDS))
    assert (look.rank, look.pid, look.step) == (1, os.getpid(), 7)
    assert (look.kind, look.function, look.waits, look.waiting) == ("lock", "blocked", (), False)
    assert look.still == look.same
    assert look.entered == {"0": 6}
    assert "asleep" in look.kernel
    assert look.place is not None
    assert "test_watcher.py:" in look.place


def test_a_thread_that_goes_on() -> None:
    """It has not stood in one place, and costs no look at what is dear."""
    end = threading.Event()

    def goes_on() -> None:
        while not end.is_set():
            time.sleep(0.001)
            time.sleep(0.001)
            sum(range(10))

    class Dear(Record):
        def newest(self) -> list[Entry]:
            raise AssertionError

    with watched(goes_on, Dear({"0": (6, 5)})) as watcher:
        for number in range(6):
            watcher._step = lambda number=number: number
            look = watcher.look()
            time.sleep(0.15)
    end.set()
    assert (look.same, look.waits, look.recent) == (0.0, (), ())


def test_a_thread_that_computes_in_one_place() -> None:
    """Its processor time moves."""
    end = threading.Event()

    def computes() -> None:
        while not end.is_set():
            sorted(range(3_000_000), key=None)

    with watched(computes) as watcher:
        look = looks(watcher, lambda look: look.same >= 1.5 and look.still < look.same - 0.5)
    end.set()
    assert look.kind == ""


@pytest.mark.parametrize("busy", [True, False])
def test_a_thread_that_waits_for_its_own_process(busy: bool) -> None:
    """Another thread of the process that works for it moves; one that sleeps does not."""
    items: queue.Queue[int] = queue.Queue()
    end = threading.Event()

    def works() -> None:
        while not end.wait(0.001 if busy else 3600):
            sum(range(50_000))

    threading.Thread(target=works, daemon=True).start()
    with watched(items.get) as watcher:
        if busy:
            looks(watcher, lambda look: look.same >= 1.5 and look.still < look.same - 0.5)
        else:
            assert looks(watcher, stands_for(1.5)).still >= 1.5
    end.set()


_WORKS = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: sum(range(1000))"


@pytest.mark.parametrize("command, moves", [(["sleep", "600"], False), ([sys.executable, "-c", _WORKS], True)])
def test_a_thread_that_waits_for_a_child(command: list[str], moves: bool) -> None:
    """What the child does counts."""
    child = subprocess.Popen(command)
    try:
        with watched(child.wait) as watcher:
            assert looks(watcher, stands_for(WAIT_SECONDS)).kind == "process"
            look = looks(watcher, lambda look: look.same >= 1.5 and (look.still < look.same - 0.5 or not moves))
            assert (look.still >= 1.5) is not moves
    finally:
        child.kill()
        child.wait()


def test_data_that_trickles_in() -> None:
    """A download moves however slow it is, and a connection on which nothing comes does not."""
    one, other = socket.socketpair()
    end = threading.Event()

    def sends() -> None:
        while not end.wait(0.1):
            other.sendall(b"x" * 100)

    def receives() -> None:
        with one.makefile("rb") as file:
            file.read()

    threading.Thread(target=sends, daemon=True).start()
    with watched(receives) as watcher:
        looks(watcher, lambda look: look.same >= 1.5 and look.kind == "socket" and look.still < look.same - 0.5)
        end.set()
        assert looks(watcher, lambda look: look.still >= 1.5).kind == "socket"
    one.shutdown(socket.SHUT_RDWR)
    one.close()
    other.close()


def test_a_thread_that_writes_now_and_then() -> None:
    """Bytes move, although it sleeps most of the time, and no look may ever meet it elsewhere."""
    end = threading.Event()
    read, write = os.pipe()

    def writes() -> None:
        while not end.is_set():
            os.write(write, b"x" * 4000)
            time.sleep(0.1)

    threading.Thread(target=lambda: [0 for _ in iter(lambda: os.read(read, 1 << 16), b"")], daemon=True).start()
    with watched(writes) as watcher:
        seen = [looks(watcher, lambda look: True) for _ in range(16) if not time.sleep(0.15)]
    end.set()
    assert max(look.still for look in seen) < 1.5


def meets() -> None:
    dist.distributed_c10d._store_based_barrier(0, dist.HashStore(), "", 2, datetime.timedelta(seconds=3600))


def stopped(
    monkeypatch: pytest.MonkeyPatch,
    thread: kernel.Kernel | None = None,
    wanted: Callable[[], dict[int, float]] = dict,
) -> Watcher:
    """Return a watcher of a process in which nothing moves but what is given."""
    module = "ddpdebug.progress.watcher"
    shown = thread or kernel.Kernel(state="S")
    monkeypatch.setattr(f"{module}.kernel.thread", lambda native: shown)
    monkeypatch.setattr(f"{module}.kernel.disk_beside", lambda native: 0)
    monkeypatch.setattr(f"{module}.kernel.wanted_beside", lambda native: wanted())
    monkeypatch.setattr(f"{module}.kernel.family", lambda pids: kernel.Family())
    monkeypatch.setattr(f"{module}.time.process_time", lambda: 0.0)
    monkeypatch.setattr(f"{module}.time.thread_time", lambda: 0.0)
    return Watcher(0, Record(), members=dict, thread=lambda: 0, step=lambda: 0, workers=list)


def in_torch(function: Callable[[], object], name: str, file: str = "distributed_c10d.py") -> Callable[[], None]:
    """Return a call of a function whose frame looks like one of torch.distributed's."""
    code = compile(f"def {name}(wait):\n    wait()\n", f"/x/site-packages/torch/distributed/{file}", "exec")
    scope: dict[str, Callable[[Callable[[], None]], None]] = {}
    exec(code, scope)
    return lambda: scope[name](function)


def in_collective(name: str = "all_reduce") -> Callable[[], None]:
    lock = threading.Lock()
    lock.acquire()
    return in_torch(lock.acquire, name)


def test_a_thread_in_a_collective() -> None:
    """What it waits in, with the line; what is done is no more than recent."""
    record = Record(
        {"0": (6, 5), "1": (3, 3)}, [Entry(number=5, is_done=True), Entry(), Entry(group="1", number=3, is_done=True)]
    )
    with watched(in_collective(), record) as watcher:
        look = looks(watcher, stands_for(2 * WAIT_SECONDS))
    assert look.kind == look.phase == "collective"
    assert [(call.group, call.number, call.operation, call.ranks) for call in look.waits] == [
        ("0", 6, "all_reduce", (0, 1))
    ]
    assert look.waits[0].location == look.place
    assert [call.number for call in look.recent] == [5, 6, 3]
    assert look.waiting


def test_a_line_that_was_noted_is_better_than_where_the_thread_stands() -> None:
    """And brings the root."""

    class Kept(NoNotes):
        def kept(self) -> list[Noted]:
            call = Call(group="0", number=6, operation="broadcast", location="train.py:50", root=3)
            return [Noted(call=call, step=7, batches=0)]

    record = Record({"0": (6, 5)}, [Entry(operation="broadcast")])
    with watched(in_collective(), record, notes=Kept()) as watcher:
        look = looks(watcher, stands_for(WAIT_SECONDS))
    assert [(call.location, call.root) for call in look.waits] == [("train.py:50", 3)]


@pytest.mark.parametrize("known", [{"0": (6, 5)}, {}, None])
def test_a_recorder_that_tells_less(known: dict[str, tuple[int, int]] | None) -> None:
    """Without entries the call is named by the function of torch's that the thread is in; without counts too."""
    with watched(in_collective("broadcast"), Record(known)) as watcher:
        look = looks(watcher, stands_for(WAIT_SECONDS))
    assert [(call.operation, call.number) for call in look.waits] == [("broadcast", 6 if known else 0)]


def test_counts_of_which_the_newest_did_not_complete_last() -> None:
    """Torch tells of the one that ended last: where all are done nothing is waited for, whatever the counts say."""
    record = Record({"0": (6, 5)}, [Entry(number=5, is_done=True), Entry(number=6, is_done=True)])
    with watched(in_collective(), record) as watcher:
        look = looks(watcher, stands_for(2 * WAIT_SECONDS))
    assert (look.kind, look.waits) == ("collective", ())


def test_a_collective_that_ends_while_its_counts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is read again, for its counts may be behind."""
    monkeypatch.setattr("ddpdebug.progress.watcher._READ_SECONDS", 0.0)
    record = Record({"0": (6, 5)}, [Entry()])
    with watched(in_collective(), record) as watcher:
        assert looks(watcher, stands_for(2 * WAIT_SECONDS)).waits
        record.entries = [Entry(is_done=True)]
        assert looks(watcher, stands_for(2 * WAIT_SECONDS)).waits == ()


@pytest.mark.parametrize("name, waits", [("monitored_barrier", True), ("recv", True), ("all_reduce", False)])
def test_what_is_in_no_record(name: str, waits: bool) -> None:
    """Where torch keeps a record, only what it leaves out is waited in without an entry."""
    record = Record({"0": (6, 6)}, [Entry(is_done=True)])
    with watched(in_collective(name), record) as watcher:
        look = looks(watcher, stands_for(2 * WAIT_SECONDS))
    assert [(call.operation, call.number) for call in look.waits] == ([(name, 0)] if waits else [])


@pytest.mark.parametrize("known", [{}, {"0": (6, 6)}])
@pytest.mark.parametrize("path", ["checkpoint/filesystem.py", "fsdp/_fully_shard/_fsdp_state.py", "rpc/api.py"])
def test_the_rest_of_torch_distributed_waits_for_no_rank(path: str, known: dict[str, tuple[int, int]]) -> None:
    """A checkpoint that one rank writes, for one."""
    with watched(in_torch(threading.Event().wait, "save", path), Record(known)) as watcher:
        look = looks(watcher, stands_for(2 * WAIT_SECONDS))
    assert (look.phase, look.waits) == ("script", ())


def test_a_collective_of_another_part_of_torch() -> None:
    """Called from C++ there, and in the record."""
    lock = threading.Lock()
    lock.acquire()
    waits = in_torch(lock.acquire, "unshard", "fsdp/_fully_shard/_fsdp_param_group.py")
    with watched(waits, Record({"0": (6, 5)}, [Entry()])) as watcher:
        look = looks(watcher, stands_for(2 * WAIT_SECONDS))
    assert (look.kind, [call.number for call in look.waits]) == ("collective", [6])


def test_a_pause_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody could have seen is no standstill: of a time without looks two seconds count, and those once only."""
    clock = [1000.0]
    monkeypatch.setattr("ddpdebug.progress.watcher.time.monotonic", lambda: clock[0])
    watcher = stopped(monkeypatch)
    for after, same, still in [
        (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (1.0, 2.0, 2.0), (1.0, 3.0, 3.0),
        (500.0, 5.0, 2.0), (1.0, 6.0, 6.0), (1.0, 7.0, 7.0),
    ]:  # fmt: skip
        clock[0] += after
        look = watcher.look()
        assert (look.same, look.still) == (same, still)


def test_storage_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long call counts as movement for a minute, and no longer."""
    clock = [1000.0]
    monkeypatch.setattr("ddpdebug.progress.watcher.time.monotonic", lambda: clock[0])
    watcher = stopped(monkeypatch, kernel.Kernel(state="D", wchan="rq_qos_wait", wakes=3))
    still = []
    for _ in range(80):
        clock[0] += 1.0
        still.append(watcher.look().still)
    assert max(still[2:60]) <= 1.0
    assert still[-1] > 15.0


def test_a_thread_beside_that_gets_no_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wants to run all the time, and on a busy machine gets next to nothing; those that only wake do not count."""
    for wanted, moves in ((0.9, True), (0.1, False)):
        clock = [1000.0]
        with monkeypatch.context() as patch:
            patch.setattr("ddpdebug.progress.watcher.time.monotonic", lambda clock=clock: clock[0])
            watcher = stopped(patch, wanted=lambda clock=clock, wanted=wanted: {7: wanted * clock[0]})
            for _ in range(8):
                clock[0] += 1.0
                still = watcher.look().still
        assert (still < 1.0) is moves


def test_the_meeting_of_a_group() -> None:
    """In the store, where there is no collective yet."""
    with watched(meets) as watcher:
        look = looks(watcher, stands_for(WAIT_SECONDS))
    assert look.kind == "store"
    assert [call.operation for call in look.waits] == ["_store_based_barrier"]


def test_a_message() -> None:
    """It is waited in although it is counted in no order."""
    record = Record({"0": (5, 5)}, [Entry(operation="recv", number=1, point_to_point=True)])
    with watched(in_collective("recv"), record) as watcher:
        look = looks(watcher, stands_for(WAIT_SECONDS))
    assert [(call.operation, call.point_to_point) for call in look.waits] == [("recv", True)]


def test_a_collective_that_ends_begins_the_time_anew() -> None:
    """The thread is at the same line, and has gone on all the same."""
    record = Record({"0": (6, 5)}, [Entry()])
    with watched(in_collective(), record) as watcher:
        looks(watcher, stands_for(2 * WAIT_SECONDS))
        record.known, record.entries = {"0": (7, 6)}, [Entry(is_done=True), Entry(number=7)]
        assert watcher.look().same == 0.0
        look = looks(watcher, stands_for(WAIT_SECONDS))
    assert [call.number for call in look.waits] == [7]


def test_children_that_work_are_nothing_to_a_collective() -> None:
    """A loader's workers fetch ahead while their rank waits for others."""
    child = subprocess.Popen([sys.executable, "-c", _WORKS])
    try:
        with watched(in_collective(), Record({"0": (6, 5)}, [Entry()]), workers=(child.pid,)) as watcher:
            assert looks(watcher, stands_for(1.5)).still >= 1.5
    finally:
        child.kill()
        child.wait()


def test_the_thread_of_a_forked_process() -> None:
    """Its number is that of the process, not of the one that it was forked from."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        lock = threading.Lock()
        lock.acquire()
        seen = []

        def look() -> None:
            watcher = Watcher(0, Record(), members=dict, thread=lambda: threading.main_thread().ident or 0,
                              step=lambda: 0, workers=list)  # fmt: skip
            for _ in range(8):
                seen.append(watcher.look())
                time.sleep(0.15)
            os.write(write, seen[-1].kernel.encode())
            os._exit(0)

        threading.Thread(target=look).start()
        lock.acquire()
    os.close(write)
    assert os.read(read, 100).startswith(b"asleep")
    os.waitpid(pid, 0)


def test_a_thread_that_has_ended() -> None:
    """There is nothing to see, and no error."""
    with watched(lambda: None) as watcher:
        look = looks(watcher, stands_for(WAIT_SECONDS))
    assert (look.place, look.kind, look.stack) == (None, "", ())


def test_workers_in_words() -> None:
    """Only while a batch is waited for, and with one that has ended."""
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert until(lambda: "asleep" in _states([child.pid]))
        gone = subprocess.Popen(["true"])
        gone.wait()
        assert _states([child.pid, gone.pid]).startswith(f"worker {child.pid} asleep")
        assert _states([child.pid, gone.pid]).endswith(f"worker {gone.pid} has ended")
    finally:
        child.kill()
        child.wait()
