"""Where a thread is, in words: threads that stand in known places, and calls as the source has them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime
import fcntl
import io
import os
import pdb  # noqa: T100 - a prompt that waits is what is looked at
import pickle
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machine import until

from ddpdebug import source_lines
from ddpdebug.progress import frames
from ddpdebug.progress.foreign_stack import Place

_HERE = f"{Path(__file__).name}:"
#: Functions in which ranks meet in the store.
_MEETINGS = ("_store_based_barrier", "rendezvous")


@contextmanager
def standing(function: Callable[[], object]) -> Iterator[frames.At]:
    """Yield where a thread is that runs a function, once it has stood still for a while."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()

    def stands() -> bool:
        before = frames.signature(frames.take(sys._current_frames().get(thread.ident or 0)))
        time.sleep(0.2)
        now = frames.take(sys._current_frames().get(thread.ident or 0))
        return frames.signature(now) == before and frames.look(now).place is not None

    assert until(stands, 60)
    yield frames.look(frames.take(sys._current_frames()[thread.ident or 0]))
    thread.join(0.0)


#: Of a module that a rank and its judge have both loaded.
PATTERN, INDEX = re.compile("a+"), {"a": 1}


@pytest.mark.parametrize(
    "file, function, call, kind",
    [
        (re.__file__, "match", "", "regex"),
        (re.__file__, "findall", "", ""),  # many attempts: it may go on well
        (__file__, "train", "PATTERN.search(text)", "regex"),
        (__file__, "train", "PATTERN.findall(text)", ""),
        (__file__, "train", "INDEX.search(text)", ""),  # of another class
        (__file__, "train", "nowhere.search(text)", ""),
        (__file__, "train", "pickle.dumps(PATTERN.match)", ""),
        (__file__ + "x", "train", "PATTERN.search(text)", ""),  # of a module that is not loaded here
        (pickle.__file__, "search", "PATTERN.search(text)", ""),
    ],
)
def test_what_matches_a_regular_expression_is_known_by_its_innermost_frame(
    file: str, function: str, call: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of `re`'s functions, or a line that calls a method of what is a pattern in this process too."""
    monkeypatch.setattr(source_lines, "getline", lambda *_: f"    found = {call}")
    columns = (12, 12 + len(call)) if call else None
    place = Place(file=file, line=1, function=function, columns=columns)
    users = Place(file=__file__, line=1, function="train", columns=columns)
    assert frames.of_places([place, users]).kind == kind


def lock(end: threading.Event) -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire(timeout=3600)


def with_lock(end: threading.Event) -> None:
    held_lock = threading.Lock()
    held_lock.acquire()
    threading.Thread(target=lambda: (end.wait(), held_lock.release()), daemon=True).start()
    with held_lock:
        pass


def event(end: threading.Event) -> None:
    end.wait()


def joined(end: threading.Event) -> None:
    other = threading.Thread(target=end.wait, daemon=True)
    other.start()
    other.join()


def future(end: threading.Event) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(end.wait).result()


def item(end: threading.Event) -> None:
    queue.Queue().get(timeout=3600)


def item_in_c(end: threading.Event) -> None:
    items = queue.SimpleQueue()
    items.get(timeout=3600)


def receives(end: threading.Event) -> None:
    one, _other = socket.socketpair()
    one.recv(1)


def accepts(end: threading.Event) -> None:
    socket.create_server(("127.0.0.1", 0)).accept()


def selects(end: threading.Event) -> None:
    read, _write = os.pipe()
    select.select([read], [], [], 3600)


def loop(end: threading.Event) -> None:
    asyncio.run(asyncio.sleep(3600))


def pipe(end: threading.Event) -> None:
    read, _write = os.pipe()
    os.read(read, 1)


def locked_file(end: threading.Event) -> None:
    name = f"/proc/self/fd/{os.memfd_create('lock')}"
    held, wanted = os.open(name, os.O_WRONLY), os.open(name, os.O_WRONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    fcntl.flock(wanted, fcntl.LOCK_EX)


def child(end: threading.Event) -> None:
    started = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    threading.Thread(target=lambda: (end.wait(), started.stdin.close()), daemon=True).start()
    started.wait()


def waited(end: threading.Event) -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(3600)
        os._exit(0)
    threading.Thread(target=lambda: (end.wait(), os.kill(pid, signal.SIGKILL)), daemon=True).start()
    os.waitpid(pid, 0)


def sleeps(end: threading.Event) -> None:
    time.sleep(3600)


def asked(end: threading.Event) -> None:
    read, _write = os.pipe()
    stdin = os.fdopen(read)
    stdin.readline()


def prompt(end: threading.Event) -> None:
    read, _write = os.pipe()
    pdb.Pdb(stdin=os.fdopen(read), stdout=io.StringIO(), nosigint=True, readrc=False).set_trace()
    time.sleep(0)


def store(end: threading.Event) -> None:
    import torch.distributed as dist

    kept_store = dist.HashStore()
    kept_store.set_timeout(datetime.timedelta(days=1))  # an error in five minutes would be that of another test
    kept_store.wait(["never"])


def computes(end: threading.Event) -> None:
    while not end.is_set():
        sum(range(10**7))


_KINDS = [
    (lock, "lock"), (with_lock, "lock"), (event, "lock"), (joined, "lock"), (future, "lock"), (item, "queue"),
    (item_in_c, "queue"), (receives, "socket"), (accepts, "socket"), (selects, "file"), (loop, "socket"),
    (pipe, "file"), (locked_file, "file"), (child, "process"), (waited, "process"), (sleeps, "sleep"),
    (asked, "input"), (prompt, "debugger"), (store, "key"), (computes, ""),
]  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize("function, kind", _KINDS, ids=[function.__name__ for function, _ in _KINDS])
def test_what_a_thread_waits_for(function: Callable[[threading.Event], None], kind: str) -> None:
    """And the innermost line of the user's, with its call."""
    end = threading.Event()
    try:
        with standing(lambda: function(end)) as at:
            assert at.kind == kind, at
            assert kind == "" or kind in frames.OWN
            assert at.function == function.__name__
            assert at.place is not None
            assert at.does.split("(")[0].split(".")[0] in Path(__file__).read_text(encoding="utf-8")
            assert _HERE in at.place
            assert (at.phase, at.stack[-1].endswith(("(_bootstrap)", "(_bootstrap_inner)"))) == ("script", True)
    finally:
        end.set()


def call_of(source: str, line: int, tmp_path: Path) -> frames.At:
    """Return where code stands that calls `here()` in a line."""
    file = tmp_path / "script.py"
    file.write_text(source, encoding="utf-8")
    seen: list[frames.At] = []

    def here(*args: object, **kwargs: object) -> list[int]:
        seen.append(frames.look(frames.take(sys._getframe(1)), _MEETINGS))
        return [1]

    exec(compile(source, str(file), "exec"), {"here": here})
    assert seen[0].place is not None
    assert seen[0].place.endswith(f"script.py:{line}")
    return seen[0]


@pytest.mark.parametrize(
    "source, line, does",
    [
        ("x = 1 + here(2)[0]\n", 1, "here(2)"),
        ("a = here(1) + here(2)\n", 1, "here(1)"),
        ("größe = 1; here(größe)\n", 1, "here(größe)"),
        ("def f(x):\n    return x\n\nf(\n    here(3),\n)\n", 5, "here(3)"),
        ("here(\n    1,\n)\n", 1, "here("),
        (f"here({'a' * 200!r})\n", 1, f"here({'a' * 200!r})"[:80]),
    ],
)
def test_a_call_reads_as_in_the_source(source: str, line: int, does: str, tmp_path: Path) -> None:
    """The innermost one that is under way, cut where it is long; the line alone where it goes over several."""
    assert call_of(source, line, tmp_path).does == does


def test_source_that_is_not_there(tmp_path: Path) -> None:
    """Code without a file has a place all the same."""
    seen: list[frames.At] = []
    exec(
        compile("\n\nhere()", str(tmp_path / "gone.py"), "exec"),
        {"here": lambda: seen.append(frames.look(frames.take(sys._getframe(1)), _MEETINGS))},
    )
    assert seen[0].place is not None
    assert seen[0].place.endswith("gone.py:3")
    assert (seen[0].does, seen[0].kind) == ("", "")


def test_no_frame() -> None:
    """A thread that has ended is nowhere."""
    assert frames.take(None) == ()
    assert frames.look(()) == frames.At()


def test_a_checkout_of_somebody_else_may_be_called_as_this_package(tmp_path: Path) -> None:
    """Only files of this package are left out."""
    folder = tmp_path / "ddpdebug" / "mine"
    folder.mkdir(parents=True)
    assert call_of("here()\n", 1, folder).does == "here()"


def test_a_signature_changes_as_soon_as_anything_goes_on() -> None:
    """Also when an outer frame has gone on and the inner one is the same again."""
    seen = []

    def inner() -> None:
        seen.append(frames.signature(frames.take(sys._getframe())))

    inner(), inner()
    for _ in range(2):
        inner()
    assert len({seen[0], seen[1], seen[2]}) == 3
    assert seen[2] == seen[3]


def inside(path: str, name: str, tmp_path: Path, call: str = "look()") -> frames.At:
    """Return where a thread is whose line has called a function of a library."""
    seen: list[frames.At] = []
    library: dict[str, Callable[[], None]] = {
        "look": lambda: seen.append(frames.look(frames.take(sys._getframe(1)), _MEETINGS))
    }
    file = tmp_path / f"site-packages{path}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"def {name}():\n    {call}\n", encoding="utf-8")
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), library)
    exec(compile(f"\n{name}()\n", str(tmp_path / "train.py"), "exec"), library)
    assert seen[0].place is not None
    assert seen[0].place.endswith("train.py:2")
    return seen[0]


@pytest.mark.parametrize(
    "path, name, phase, kind",
    [
        ("/torch/utils/data/dataloader.py", "inner", "data", "loader"),
        ("/torch/autograd/graph.py", "inner", "backward", "backward"),
        ("/torch/optim/sgd.py", "inner", "optimizer", ""),
        ("/torch/nn/modules/module.py", "inner", "forward", ""),
        ("/torch/distributed/distributed_c10d.py", "all_reduce", "collective", "collective"),
        ("/torch/distributed/distributed_c10d.py", "_store_based_barrier", "collective", "store"),
        ("/torch/distributed/rendezvous.py", "rendezvous", "collective", "store"),
        ("/torch/distributed/distributed_c10d.py", "destroy_process_group", "script", ""),
        ("/torch/distributed/checkpoint/state_dict_saver.py", "save", "script", ""),
        ("/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", "all_reduce", "script", ""),
    ],
)
def test_a_library_tells_the_phase(path: str, name: str, phase: str, kind: str, tmp_path: Path) -> None:
    """By the frames between the user's line and what it waits in; not all of `torch.distributed` waits for others."""
    at = inside(path, name, tmp_path)
    assert (at.phase, at.kind) == (phase, kind)
    assert at.unrecorded is (kind == "store")
    assert at.among is ("/distributed/" in path)


@pytest.mark.parametrize("name, unrecorded", [("monitored_barrier", True), ("recv", True), ("barrier", False)])
def test_what_torch_keeps_no_record_of(name: str, unrecorded: bool, tmp_path: Path) -> None:
    """A closed table: whatever else waits is in the record."""
    at = inside("/torch/distributed/distributed_c10d.py", name, tmp_path)
    assert (at.kind, at.unrecorded) == ("collective", unrecorded)


def test_a_checkpoint_that_is_written(tmp_path: Path) -> None:
    """It waits for storage, for no rank, although it is a part of `torch.distributed`."""
    at = inside("/torch/distributed/checkpoint/filesystem.py", "save", tmp_path, call="fsync = look; fsync()")
    assert (at.phase, at.kind, at.unrecorded) == ("script", "file", False)


@pytest.mark.parametrize(
    "line, called, kind",
    [
        ("handles.get(key).wait()", "handles.get.wait(", ""),
        ("work.wait(q.get())", "work.wait(", ""),
        ("value = q.get()", "q.get(", "queue"),
        ("other.queues[0].put(", "other.queues.put(", "queue"),
        ("for one in q.get():", "q.get(", "queue"),
        ("await_lock = lock.acquire(read())", "lock.acquire(", "lock"),
        ("with self.big_lock:", "with self.big_lock:", "lock"),
        ("kept_store.get(name)", "kept_store.get(", "key"),
        ("sys.stdin", "sys.stdin", "input"),
        ("sys.stdin.readline()", "sys.stdin.readline(", "input"),
        ("print(input_ids.read())", "print(", ""),
        ("] + [", "] + [", ""),
    ],
)
def test_only_the_outermost_call_tells(line: str, called: str, kind: str) -> None:
    """What stands in its arguments, or gave what it is called of, is done."""
    assert frames._called(line) == called
    assert next((kind for pattern, kind in frames._CALLS if pattern.search(called)), "") == kind
