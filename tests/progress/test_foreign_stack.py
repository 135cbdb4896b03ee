"""The stack of a process in which nothing runs any more."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from machine import until

from ddpdebug.progress import foreign_stack, frames, kernel

_HEAD = """
import ctypes, os, signal, sys, threading, time
from ddpdebug.progress import foreign_stack

def tell():
    print(os.getpid(), foreign_stack.thread_state(threading.get_ident()), flush=True)
"""
_STOPS = {
    "the interpreter's lock is held in C": "def größe():\n    ctypes.PyDLL(None).sleep(600)  # here\ntell()\ngröße()",
    "it is stopped": "def größe():\n    os.kill(os.getpid(), signal.SIGSTOP)  # here\ntell()\ngröße()",
    "another thread than the main one": (
        "def größe():\n    tell()\n    time.sleep(600)  # here\n"
        "thread = threading.Thread(target=größe)\nthread.start()\nthread.join()"
    ),
    "a function in a generator": ("def größe():\n    yield time.sleep(600)  # here\ntell()\nnext(iter(größe()))"),
    "a call by C": "def größe(_):\n    time.sleep(600)  # here\ntell()\nlist(map(größe, [1]))",
}


@pytest.mark.parametrize("kind", _STOPS)
def test_the_line_of_now_is_read(kind: str, tmp_path: Path) -> None:
    """Whatever stops the process, also in a file and a function whose names are not ASCII."""
    script = tmp_path / "prüfung.py"
    script.write_text(_HEAD + _STOPS[kind], encoding="utf-8")
    line = script.read_text(encoding="utf-8")[: script.read_text(encoding="utf-8").index("# here")].count("\n") + 1
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pid, state = map(int, process.stdout.readline().split())

            def is_there() -> bool:
                found = frames.of_places(foreign_stack.read(pid, state))
                return (found.place or "").endswith(f"prüfung.py:{line}") and found.function == "größe"

            assert until(is_there)
            found = frames.of_places(foreign_stack.read(pid, state))
            assert found.does
            assert found.does in script.read_text(encoding="utf-8").splitlines()[line - 1]
            assert any("größe" in frame for frame in found.stack)
            if kind == "it is stopped":
                shown = kernel.process(pid)
                assert shown is not None
                assert shown.is_stopped
        finally:
            process.kill()


def test_nothing_of_nonsense() -> None:
    """An address that leads nowhere, a process that has gone: no stack, and no error."""
    own = foreign_stack.thread_state(threading.get_ident())
    assert foreign_stack.read(os.getpid(), own)
    for pid, state in ((os.getpid(), 0), (os.getpid(), own + 8), (os.getpid(), 1 << 62), (1 << 30, own)):
        assert foreign_stack.read(pid, state) == []
    assert foreign_stack.thread_state(1) == 0


def test_functions_of_ctypes_are_left_alone() -> None:
    """What the script declares, or does not declare, of the interpreter's functions stays as it is."""
    import ctypes

    foreign_stack.thread_state(threading.get_ident())
    assert ctypes.pythonapi.PyThreadState_Get.restype is ctypes.c_int
