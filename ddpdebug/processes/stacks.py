"""Stacks of a hang: armed in advance, written by faulthandler at the deadline, even during a call that hangs in C.

Python's `faulthandler` writes the stacks from a thread of its own at a moment that is set in advance. It needs no
signal, which the job may use itself, and not the interpreter's lock, which a hanging call may hold.
"""

from __future__ import annotations

import faulthandler
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from ddpdebug.clock import time
from ddpdebug.disk import Disk
from ddpdebug.isolation.user_code import is_user_file
from ddpdebug.processes.dump_timer import TIMER

#: `<seconds of the monotonic clock> <folder>`: when the ranks write their stacks, and where to.
DEADLINE = "DDPDEBUG_DEADLINE"
#: The folder beside those of the ranks that were started for the check: of ranks that the script has started.
SPAWNED = "spawned"
#: How long the stacks may take after the deadline.
PATIENCE_SECONDS = 2.0
_MAX_BYTES = 1 << 20
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>[0-9]+) in (?P<name>.*)$', re.MULTILINE)
_OWN = str(Path(__file__).parent.parent)


def deadline(timeout: float, folder: Path) -> str:
    """Return the value of the environment variable `DEADLINE` for ranks that start now."""
    return f"{time.monotonic() + timeout} {folder}"


def arm(environ: Mapping[str, str]) -> None:
    """Arm this rank's stack dump for the deadline in the environment; do nothing without one."""
    when, _, folder = environ.get(DEADLINE, "").partition(" ")
    try:
        moment = float(when)
        file = (Path(folder) / environ.get("RANK", "0")).open("w", encoding="utf-8")
    except (OSError, ValueError):
        return
    TIMER.set(moment, file)


def arm_spawned(environ: Mapping[str, str], rank: int) -> None:
    """Arm the stack dump of a rank that the script has started; do nothing without a deadline."""
    when, _, folder = environ.get(DEADLINE, "").partition(" ")
    if folder:
        with suppress(OSError):
            (Path(folder) / SPAWNED).mkdir(exist_ok=True)
        arm({DEADLINE: f"{when} {folder}/{SPAWNED}", "RANK": str(rank)})


def collect(folder: Path, ranks: Iterable[int]) -> dict[int, str]:
    """Return the stacks that ranks have written, after waiting a little for those that have begun."""
    until = time.monotonic() + PATIENCE_SECONDS
    started = [rank for rank in ranks if (folder / str(rank)).is_file()]
    while time.monotonic() < until and not all((folder / str(rank)).stat().st_size for rank in started):
        time.sleep(0.05)
    time.sleep(0.05)  # the rest of a stack follows its first line at once
    texts = {rank: _read(folder / str(rank)) for rank in started}
    return {rank: text for rank, text in texts.items() if text}


def frames_of(text: str) -> list[tuple[str, int, str]]:
    """Return the frames of the main thread as (file, line, function), innermost first."""
    part = text.rstrip().split("\n\n")[-1]
    return [(found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(part)]


def place(text: str) -> str:
    """Return the place of the main thread in words: the user's line, and the function that waits."""
    frames = frames_of(text)
    if not frames:
        return ""
    users = next((frame for frame in frames if is_user_file(frame[0])), None)
    inner = _words(frames[0])
    if users is None:
        begun = any(
            outer[2] == "run_script" and outer[0].startswith(_OWN) and not called[0].startswith(_OWN)
            for called, outer in pairwise(frames)
        )
        return f"in {inner}" if begun else f"before the first line of the script, in {inner}"
    return f"in {_words(users)}" + ("" if users == frames[0] else f", which waits in {inner}")


def as_text(threads: Mapping[str, Sequence[str]], training: Sequence[str]) -> str:
    """Return stacks ("file:line (function)", innermost first) in faulthandler's format, the training thread last."""
    own = next((name for name, stack in threads.items() if stack and stack[-1:] == training[-1:]), "MainThread")
    others = {name: stack for name, stack in threads.items() if name != own}
    blocks = []
    for name, stack in {**others, own: training}.items():
        lines = [f"Thread {name} (most recent call first):"]
        for frame in stack:
            place, _, function = frame.rpartition(" (")
            file, _, line = place.rpartition(":")
            lines.append(f'  File "{file}", line {line} in {function.rstrip(")")}')
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _words(frame: tuple[str, int, str]) -> str:
    file, line, name = frame
    parts = Path(file).parts
    shown = file if is_user_file(file) else "/".join(parts[-2:])
    return f"{shown}:{line} ({name})"


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def write_now(file: Path, disk: Disk) -> str:
    """Write the stacks of this process to a file and return them."""
    try:
        disk.make_directory(file.parent)
        with disk.create(file) as opened:
            faulthandler.dump_traceback(file=opened, all_threads=True)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError:
        return ""
    return _read(file)
