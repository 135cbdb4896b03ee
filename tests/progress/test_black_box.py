"""The black box: what a process has written is there whatever has ended it, and whoever reads it at that moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import until

from ddpdebug.disk import Disk
from ddpdebug.progress import black_box
from ddpdebug.progress.black_box import BlackBox

_WRITER = """
import os, signal, sys, time
from pathlib import Path
from ddpdebug.disk import Disk
from ddpdebug.progress.black_box import BlackBox
box = BlackBox(Path(sys.argv[1]), Disk())
box.beat({"place": "train.py:33"})
for number in range(1, int(sys.argv[3]) + 1):
    box.note(f"all_reduce #{number}")
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "black_box"


@pytest.fixture
def box(file: Path) -> Iterator[BlackBox]:
    made = BlackBox(file, Disk())
    yield made
    made.close()


def test_what_was_written_is_read(box: BlackBox, file: Path) -> None:
    """The newest look, the notes in their order, and whose they are."""
    before = time.monotonic()
    box.beat({"place": "train.py:1"})
    box.beat({"place": "train.py:2", "größe": [1, None]})
    box.note("all_reduce #1")
    box.note("broadcast #2")
    found = black_box.read(file)
    assert found is not None
    assert (found.pid, found.here) == (os.getpid(), True)
    assert found.look == {"place": "train.py:2", "größe": [1, None]}
    assert [(note.number, note.text) for note in found.notes] == [(1, "all_reduce #1"), (2, "broadcast #2")]
    assert before <= found.beat <= found.notes[0].time <= found.notes[1].time <= time.monotonic()
    shown = found.kernel()
    assert shown is not None
    assert not shown.is_gone


def test_a_beat_without_anything_new(box: BlackBox, file: Path) -> None:
    """The look stays, the time goes on."""
    box.beat({"place": "train.py:1"})
    first = black_box.read(file)
    time.sleep(0.01)
    box.beat()
    second = black_box.read(file)
    assert first is not None
    assert second is not None
    assert second.look == first.look
    assert second.beat > first.beat


def test_nothing_written_yet(box: BlackBox, file: Path) -> None:
    """A box of a process that has not looked yet is no damaged one."""
    found = black_box.read(file)
    assert found is not None
    assert (found.look, found.notes) == ({}, ())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_it_survives_its_process(number: signal.Signals, file: Path) -> None:
    """A signal that cannot be caught, and two that libraries end with, leave everything up to the last note."""
    child = subprocess.Popen([sys.executable, "-c", _WRITER, file, str(int(number)), "600"], stderr=subprocess.DEVNULL)
    assert until(
        lambda: (found := black_box.read(file)) is not None and len(found.notes) and found.notes[-1].number == 600
    )
    assert child.wait() == -number
    found = black_box.read(file)
    assert found is not None
    assert found.pid == child.pid
    assert found.look == {"place": "train.py:33"}
    numbers = [note.number for note in found.notes]
    assert numbers == list(range(numbers[0], 601))
    assert [note.text for note in found.notes] == [f"all_reduce #{number}" for number in numbers]
    assert found.kernel() is None


def test_the_ring_keeps_the_newest(box: BlackBox, file: Path) -> None:
    """The oldest notes go first, one by one."""
    for number in range(1, 1001):
        box.note(str(number))
        found = black_box.read(file)
        assert found is not None
        kept = [int(note.text) for note in found.notes]
        assert kept == list(range(number - len(kept) + 1, number + 1))
    assert 200 < len(kept) < 1000


def test_a_note_is_cut_where_it_is_long(box: BlackBox, file: Path) -> None:
    """Also within a letter of several bytes; its neighbours stay whole."""
    for text in ("before", "ö" * 500, "after"):
        box.note(text)
    found = black_box.read(file)
    assert found is not None
    texts = [note.text for note in found.notes]
    assert texts[::2] == ["before", "after"]
    assert texts[1].rstrip("\N{REPLACEMENT CHARACTER}") == "ö" * len(texts[1].rstrip("\N{REPLACEMENT CHARACTER}"))
    assert 100 <= len(texts[1]) <= 130


def test_a_look_that_is_too_long(box: BlackBox, file: Path) -> None:
    """What takes the room is left out as a whole, the rest is there."""
    box.beat({"place": "train.py:1", "stack": ["x" * 100] * 1000, "recent": [{"operation": "all_reduce"}] * 10})
    found = black_box.read(file)
    assert found is not None
    assert found.look == {"place": "train.py:1"}
    box.beat({"place": "train.py:2", "waits": ["x" * 100] * 1000, "entered": {"0" * 20_000: 1}, "recent": []})
    found = black_box.read(file)
    assert found is not None
    assert found.look == {"place": "train.py:2"}


def test_a_note_that_was_being_written(box: BlackBox, file: Path) -> None:
    """It is shown as far as it came, and said to be cut."""
    box.note("first")
    box.note("second")
    data = file.read_bytes()
    at = data.index(b"second")
    slot_end = data.index((2).to_bytes(8, "little"), at)
    with file.open("r+b") as opened:
        opened.seek(slot_end)
        opened.write(bytes(8))
    found = black_box.read(file)
    assert found is not None
    assert [note.text for note in found.notes] == ["first", "second (cut)"]


def test_a_look_that_was_being_written(box: BlackBox, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has ended in between: the look is lost, the beat and the notes are not."""
    box.note("first")
    box.beat({"place": "train.py:1"})
    counter = file.read_bytes().index((2).to_bytes(8, "little"))
    with file.open("r+b") as opened:
        opened.seek(counter)
        opened.write((3).to_bytes(8, "little"))
    found = black_box.read(file)
    assert found is not None
    assert (found.look, [note.text for note in found.notes]) == ({}, ["first"])
    assert found.beat > 0


def test_damaged_files(box: BlackBox, file: Path, tmp_path: Path) -> None:
    """Whatever stands in a file, reading it ends, and raises nothing."""
    box.beat({"place": "train.py:1"})
    box.note("first")
    data = file.read_bytes()
    other = tmp_path / "other"
    wrong = [
        b"",
        b"x",
        data[:100],
        data[:-1],
        data + b"x",
        bytes(len(data)),
        b"x" * len(data),
        data[:8] + b"\xff" * (len(data) - 8),
    ]
    for text in wrong:
        other.write_bytes(text)
        assert black_box.read(other) is None
    for at in range(0, 600, 7):
        other.write_bytes(data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :])
        found = black_box.read(other)
        assert found is None or isinstance(found.look, dict)
    assert black_box.read(tmp_path / "none") is None
    assert black_box.read(tmp_path) is None


def test_a_reader_beside_the_writer(box: BlackBox, file: Path) -> None:
    """It sees whole looks only, and never an older one after a newer one."""
    end = threading.Event()

    def write() -> None:
        number = 0
        while not end.is_set():
            number += 1
            box.beat({"number": number, "again": number, "filling": "x" * (number % 3000)})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        last = seen = 0
        until_then = time.monotonic() + 2
        while time.monotonic() < until_then:
            found = black_box.read(file, notes=False)
            assert found is not None
            if found.look:
                assert found.look["number"] == found.look["again"] >= last
                last, seen = found.look["number"], seen + 1
        assert seen > 0
    finally:
        end.set()
        writer.join()


def test_a_forked_process_writes_nothing(box: BlackBox, file: Path) -> None:
    """A worker of a loader has the memory of its rank, and is not that rank."""
    box.beat({"place": "train.py:1"})
    pid = os.fork()
    if pid == 0:
        box.beat({"place": "worker"})
        box.note("worker")
        os._exit(0)
    os.waitpid(pid, 0)
    found = black_box.read(file)
    assert found is not None
    assert (found.look, found.notes) == ({"place": "train.py:1"}, ())


def test_another_process_with_the_same_number(box: BlackBox, file: Path) -> None:
    """Numbers are given out again: the kernel is asked when it began."""
    data = bytearray(file.read_bytes())
    found = black_box.read(file)
    assert found is not None
    at = data.index(found.started.to_bytes(8, "little"))
    data[at : at + 8] = (found.started + 1).to_bytes(8, "little")
    file.write_bytes(data)
    again = black_box.read(file)
    assert again is not None
    assert again.kernel() is None


def test_a_box_in_the_place_of_another_one(box: BlackBox, file: Path) -> None:
    """Who still has the old one in memory writes on there and ends nothing."""
    box.beat({"place": "old"})
    new = BlackBox(file, Disk())
    new.beat({"place": "new"})
    box.beat({"place": "old"})
    found = black_box.read(file)
    new.close()
    assert found is not None
    assert found.look == {"place": "new"}


def test_after_its_end(box: BlackBox, file: Path) -> None:
    """Writing does nothing any more; the file stays."""
    box.beat({"place": "train.py:1"})
    box.close()
    box.beat({"place": "later"})
    box.note("later")
    box.close()
    found = black_box.read(file)
    assert found is not None
    assert (found.look, found.notes) == ({"place": "train.py:1"}, ())


def test_no_folder(tmp_path: Path) -> None:
    """It says so at once."""
    with pytest.raises(OSError, match="black_box"):
        BlackBox(tmp_path / "none" / "black_box", Disk())


def test_the_look_of_a_rank_fits(box: BlackBox, file: Path) -> None:
    """A long stack and the newest calls are kept whole."""
    look = {
        "stack": ["/home/somebody/project/package/module.py:1234 (function)"] * 40,
        "recent": [{"operation": "all_reduce", "shapes": ["float32 [1024, 1024]"], "group": "0"}] * 32,
    }
    assert len(json.dumps(look)) < 12_000
    box.beat(look)
    found = black_box.read(file)
    assert found is not None
    assert found.look == look
