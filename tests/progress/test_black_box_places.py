"""What a rank did last survives it, wherever it may be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from machine import PATIENCE

from ddpdebug.disk import Disk, kind_of
from ddpdebug.progress import black_box, kernel

_LOOK = {"step": 3, "place": "train.py:7"}


@pytest.mark.parametrize("mapped", [True, False])
def test_what_is_written_is_read(tmp_path: Path, mapped: bool) -> None:
    """The last look, the newest notes in their order, and whose they are."""
    box = black_box.BlackBox(tmp_path / "box", Disk(), mapped=mapped)
    for number in range(1, 301):
        box.beat({**_LOOK, "number": number})
        box.note(f"note {number} " + "x" * (300 if number == 300 else 0))
    box.beat()
    known = black_box.read(tmp_path / "box")
    assert known is not None
    assert (known.pid, known.started, known.here) == (os.getpid(), kernel.started(os.getpid()), True)
    assert known.look == {**_LOOK, "number": 300}
    assert [note.number for note in known.notes] == list(range(45, 301))
    assert known.notes[0].text == "note 45 "
    assert known.notes[-1].text.startswith("note 300 xxx")
    assert (tmp_path / "box").stat().st_mode & 0o777 == 0o600
    box.close()


@pytest.mark.parametrize(
    ("kind", "beside"),
    [("ext4", True), ("tmpfs", True), ("overlay", True), ("nfs4", False), ("fuse", False), ("", False)],
)
def test_a_file_system_that_may_fail_holds_none(tmp_path: Path, kind: str, beside: bool) -> None:
    """It lies in a folder of this host, is read by a note of its place, and comes to where it belongs in the end."""
    file = tmp_path / "ranks" / "0" / black_box.NAME
    file.parent.mkdir(parents=True)
    box = black_box.make(file, Disk(), lambda path: kind if tmp_path in {path, *path.parents} else "tmpfs")
    note = file.with_name("black_box.at")
    assert (file.exists(), note.exists()) == (beside, not beside)
    place = file if beside else Path(json.loads(note.read_bytes())["file"])
    box.beat(_LOOK)
    box.note("all_reduce")
    known = black_box.read(file)
    assert known is not None
    assert known.look == _LOOK
    box.close()
    assert file.exists()
    assert not note.exists()
    assert place == file or not place.parent.exists()
    assert black_box.read(file) == known


def test_another_host_does_not_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note names the host whose path it is."""
    box = black_box.make(tmp_path / "box", Disk(), lambda path: "" if path == tmp_path else "tmpfs")
    assert black_box.read(tmp_path / "box") is not None
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "host", lambda: "another")
        assert black_box.read(tmp_path / "box") is None
    box.close()


def test_no_place_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every file system is of an unknown kind there is no box, nothing is left behind, and which folder for
    temporary files the script uses is not found out for it.
    """
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(OSError, match="may not be mapped"):
        black_box.make(tmp_path / "box", Disk(), lambda path: "nfs")
    assert list(tmp_path.iterdir()) == []
    assert tempfile.tempdir is None


def test_a_judge_brings_it_home(tmp_path: Path) -> None:
    """The box of a process that was killed is copied by somebody else."""
    code = f"""
import os
from pathlib import Path
from ddpdebug.disk import Disk
from ddpdebug.progress import black_box
file = Path({str(tmp_path)!r}) / "box"
box = black_box.make(file, Disk(), lambda path: "" if path == file.parent else "tmpfs")
box.beat({_LOOK!r})
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE)
    known = black_box.read(tmp_path / "box")
    assert known is not None
    assert known.kernel() is None
    black_box.keep(tmp_path / "box", Disk())
    assert [path.name for path in tmp_path.iterdir()] == ["box"]
    assert black_box.read(tmp_path / "box") == known


def test_children_and_closed_descriptors(tmp_path: Path) -> None:
    """A child does not write its parent's box, and nothing is written to a file that has taken its place."""
    box = black_box.BlackBox(tmp_path / "box", Disk())
    box.beat(_LOOK)
    child = os.fork()
    if child == 0:
        box.beat({"step": 9})
        box.note("of a child")
        box.close()
        os._exit(0)
    os.waitpid(child, 0)
    known = black_box.read(tmp_path / "box")
    assert known is not None
    assert (known.look, known.notes) == (_LOOK, ())
    (tmp_path / "box").unlink()
    (tmp_path / "box").write_bytes(b"the user's")
    box.beat({"step": 4})
    box.close()
    assert (tmp_path / "box").read_bytes() == b"the user's"


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """The run directory was deleted: nothing is raised, at the end neither."""
    (tmp_path / "run").mkdir()
    box = black_box.BlackBox(tmp_path / "run" / "box", Disk())
    (tmp_path / "run" / "box").unlink()
    (tmp_path / "run").rmdir()
    box.beat(_LOOK)
    box.note("x")
    box.close()
    assert not (tmp_path / "run").exists()


def test_garbage(tmp_path: Path) -> None:
    """What is no box is read as none: another size, another word at its start, a pipe, a note that leads astray."""
    (tmp_path / "short").write_bytes(b"ddpdbbox")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "none.at").write_text(json.dumps({"host": kernel.host(), "file": "/etc/passwd"}))
    for name in ("short", "pipe", "none", "nothing"):
        assert black_box.read(tmp_path / name) is None
    box = black_box.BlackBox(tmp_path / "box", Disk())
    box.close()
    data = bytearray((tmp_path / "box").read_bytes())
    data[0] = 0
    (tmp_path / "box").write_bytes(data)
    assert black_box.read(tmp_path / "box") is None


def test_the_kind_is_known(tmp_path: Path) -> None:
    """Of file systems that are mounted."""
    assert kind_of(Path("/proc")) == "proc"
    assert kind_of(tmp_path)
