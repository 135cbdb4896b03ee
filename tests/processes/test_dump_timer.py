"""Whose the timer of `faulthandler` is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from machine import PATIENCE

_HEAD = """
import faulthandler, os, sys, time
from ddpdebug.processes.dump_timer import TIMER
ours, theirs = open("ours", "w+"), open("theirs", "w+")
def size(file): return os.fstat(file.fileno()).st_size
def wait(file):
    while not size(file): time.sleep(0.05)
"""
_KINDS = {
    "set before ours, by a descriptor": """
faulthandler.dump_traceback_later(1.0, file=theirs.fileno())
time.sleep(0.2)
assert not TIMER.set(time.monotonic() + 0.1, ours)
wait(theirs)
""",
    "set after ours, and there are forks": """
assert TIMER.set(time.monotonic() + 3600, ours)
faulthandler.dump_traceback_later(1.0, file=theirs)
if os.fork() == 0: os._exit(0)
assert not TIMER.set(time.monotonic() + 0.1, ours)
wait(theirs)
time.sleep(0.2)  # its thread has ended, and nothing in the process shows that the timer is the script's
assert not TIMER.set(time.monotonic() + 0.1, ours)
""",
    "cancelled by the script": """
assert TIMER.set(time.monotonic() + 0.5, ours)
faulthandler.cancel_dump_traceback_later()
if os.fork() == 0: os._exit(0)
assert not TIMER.set(time.monotonic() + 0.5, ours)
time.sleep(1.5)
assert not size(ours)
""",
    "ours, and there are forks": """
assert TIMER.set(time.monotonic() + 1.0, ours)
for _ in range(3):
    child = os.fork()
    if child == 0: sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
wait(ours)
if os.fork() == 0: os._exit(0)
""",
}


@pytest.mark.parametrize("kind", _KINDS)
def test_the_scripts_own_wins(kind: str, tmp_path: Path) -> None:
    """What the script has set is never cancelled, and what it has cancelled is not set again."""
    subprocess.run([sys.executable, "-c", _HEAD + _KINDS[kind]], cwd=tmp_path, check=True, timeout=PATIENCE)
