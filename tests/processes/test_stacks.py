"""Where a process is when its time is over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import PATIENCE, until

from ddpdebug.disk import Disk
from ddpdebug.processes import stacks

_HANGS = {
    "in Python": "import time\ndef wait():\n    time.sleep(600)\nwait()",
    "in C, with the interpreter's lock": "def wait():\n    (9 ** 99_999_999)\nwait()",
    "in C, in another thread": "import threading\ndef wait():\n    threading.Event().wait()\nwait()",
}


#: The time begins where the interpreter and the import, which take what they take, are over.
_ARMED = """
import os, runpy
from pathlib import Path
from ddpdebug.processes import stacks
stacks.arm({"RANK": "3", stacks.DEADLINE: stacks.deadline(2.0, Path.cwd())})
runpy.run_path("train.py")
"""


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Start all that hang, beside each other, and return their folders."""
    folders, started = {}, []
    for name, text in _HANGS.items():
        folders[name] = tmp_path_factory.mktemp("hangs")
        (folders[name] / "train.py").write_text(text, encoding="utf-8")
        started.append(subprocess.Popen([sys.executable, "-c", _ARMED], cwd=folders[name]))
    yield folders
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", _HANGS)
def test_stacks_come_at_the_deadline(name: str, hanging: dict[str, Path]) -> None:
    """Whatever holds the process, its stacks are written, and the user's line is named."""
    file = hanging[name] / "3"
    assert until(lambda: file.is_file() and "<module>" in file.read_text(encoding="utf-8"))
    found = stacks.collect(hanging[name], range(4))
    assert list(found) == [3]
    assert stacks.place(found[3]).startswith("in train.py:3 (wait)" if "Python" in name or "other" in name else "in ")
    assert "train.py" in stacks.place(found[3])


def test_the_scripts_own_is_left_alone(tmp_path: Path) -> None:
    """A process has one such timer: ours is set before the script's first line, and the script's replaces it."""
    script = (
        "import faulthandler, time\nfaulthandler.dump_traceback_later(0.2, file=open('own.txt', 'w'))\ntime.sleep(2.5)"
    )
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    subprocess.run([sys.executable, "-c", _ARMED], cwd=tmp_path, timeout=PATIENCE, check=True)
    assert "train.py" in (tmp_path / "own.txt").read_text(encoding="utf-8")
    assert (tmp_path / "3").read_text(encoding="utf-8") == ""


_FORKS = """
import os, sys, time
from pathlib import Path
from ddpdebug.processes import stacks

folder = Path(sys.argv[1])
os.environ[stacks.DEADLINE] = stacks.deadline(float(sys.argv[2]), folder)
stacks.arm(os.environ)
for kind in ("ends", "is a rank"):
    child = os.fork()
    if child == 0:
        if kind == "is a rank":
            stacks.arm_spawned(os.environ, 1)
            grandchild = os.fork()
            if grandchild == 0:
                sys.exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 3
            while len(sys.argv) > 3: time.sleep(0.1)
        sys.exit(4)
    if kind == "ends" or len(sys.argv) == 3:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
def waits():
    while not (folder / "0").stat().st_size or not (folder / "spawned" / "1").stat().st_size: time.sleep(0.1)
    os.kill(child, 9)
if len(sys.argv) > 3: waits()
"""


def test_forked_children_end(tmp_path: Path) -> None:
    """Also one that exits like any process, which waits for the thread of faulthandler, and one that is a rank."""
    subprocess.run([sys.executable, "-c", _FORKS, str(tmp_path), "3600"], check=True, timeout=PATIENCE)


@pytest.mark.smoke
def test_stacks_come_from_a_process_that_has_forked(tmp_path: Path) -> None:
    """At the deadline, of the parent and of the rank that it has forked."""
    subprocess.run([sys.executable, "-c", _FORKS, str(tmp_path), "5", "waits"], check=True, timeout=PATIENCE)
    assert "in waits" in (tmp_path / "0").read_text()
    assert "in <module>" in (tmp_path / stacks.SPAWNED / "1").read_text()


def test_nothing_without_a_deadline(tmp_path: Path) -> None:
    """A rank that nobody gave a deadline, or a broken one, writes nothing and does not fail."""
    for environ in ({}, {stacks.DEADLINE: "x"}, {stacks.DEADLINE: f"1 {tmp_path / 'no'}"}):
        stacks.arm(environ)
    assert stacks.collect(tmp_path, [0, 1]) == {}


def test_place_before_the_script() -> None:
    """Stacks that hold no line of the user say so."""
    frame = f'  File "{sys.base_prefix}/lib/python3.11/site-packages/torch/__init__.py", line 5 in <module>'
    assert stacks.place(f"Timeout (0:00:01)!\nThread 0x1 (most recent call first):\n{frame}\n") == (
        "before the first line of the script, in torch/__init__.py:5 (<module>)"
    )
    assert stacks.place("garbage") == ""
    ours = Path(stacks.__file__).with_name("script.py")
    begun = f'{frame}\n  File "{ours}", line 97 in run_script'
    assert stacks.place(f"Thread 0x1 (most recent call first):\n{begun}\n") == "in torch/__init__.py:5 (<module>)"


def test_own_stacks(tmp_path: Path) -> None:
    """A process can write its stacks itself; a folder that cannot be written is no failure."""
    assert "test_own_stacks" in stacks.write_now(tmp_path / "a" / "stacks.txt", Disk())
    assert stacks.write_now(Path("/proc/no/such"), Disk()) == ""
