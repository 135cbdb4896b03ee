"""Requests for the stacks of a running job's ranks: a file in the run directory, and an answer of each rank.

The one who asks writes `stacks.request`; the watch of each rank looks for it every few seconds, wherever the rank
runs, and writes `ranks/<rank>/stacks.json`. Only the user whose processes the ranks are is answered: the file must be
his. Both are JSON of bounded size. A rank whose interpreter does not run does not answer.
Torch-free.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Self

from ddpdebug.clock import time
from ddpdebug.disk import Disk
from ddpdebug.isolation import background
from ddpdebug.isolation.user_code import location
from ddpdebug.run_directory.reader import RANKS
from ddpdebug.schema.progress import RankProgress
from ddpdebug.schema.wire import Struct, from_json, to_json

REQUEST, ANSWER = "stacks.request", "stacks.json"
_MAX_REQUEST, _MAX_ANSWER = 4096, 1 << 20
_MAX_THREADS, _MAX_FRAMES, _MAX_TEXT = 64, 40, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Struct):
    """The answer of a rank."""

    request: str
    rank: int
    host: str = ""
    look: RankProgress
    threads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # name -> frames, innermost first


class Asked:
    """The rank's side: answers each request once."""

    def __init__(self, rank: int, disk: Disk) -> None:
        self._rank, self._disk, self._answered = rank, disk, ""

    def look(self, home: Path, own: RankProgress) -> None:
        """Answer a request if there is one; without one this costs a failing `open`.

        Raises:
            OSError: the answer cannot be written.
        """
        asked = _read(home / REQUEST, _MAX_REQUEST, owner=os.getuid())
        name = None if asked is None else asked.get("id")
        if not isinstance(name, str) or not 0 < len(name) <= 64 or name == self._answered:
            return
        self._answered = name
        assert asked is not None
        found = threads() if asked.get("threads") is True else {}
        answer = Answer(request=name, rank=self._rank, host=own.host, look=own, threads=found)
        text = json.dumps(to_json(answer)).encode()
        if len(text) <= _MAX_ANSWER:
            self._disk.replace(home / RANKS / str(self._rank) / ANSWER, [text])


def threads() -> dict[str, tuple[str, ...]]:
    """Return the stack of each thread of this process by name and number, innermost frame first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()} | background.names()
    found = {}
    for ident, frame in islice(sys._current_frames().items(), _MAX_THREADS):  # noqa: SLF001 - documented
        found[f"{names.get(ident, 'not of Python')[:100]} ({ident})"] = (*_frames(frame),)
    return found


def _frames(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < _MAX_FRAMES:
        code = frame.f_code
        lines.append(f"{location(code.co_filename, frame.f_lineno)} ({code.co_name})"[:_MAX_TEXT])
        frame = frame.f_back
    return lines


class Asking:
    """The requesting side: a context in which the request is open.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, directory: Path, *, threads: bool = False) -> None:
        self._directory, self._threads, self._name = directory, threads, secrets.token_hex(8)

    def __enter__(self) -> Self:
        request = {"id": self._name, "threads": self._threads}
        Disk().replace(self._directory / REQUEST, [json.dumps(request).encode()])
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            (self._directory / REQUEST).unlink()

    def answers(self, ranks: set[int], seconds: float) -> dict[int, Answer]:
        """Return the ranks' answers, after waiting at most `seconds` for all of them."""
        found: dict[int, Answer] = {}
        until = time.monotonic() + seconds
        while True:
            for rank in ranks - found.keys():
                answer = from_json(Answer, _read(self._directory / RANKS / str(rank) / ANSWER, _MAX_ANSWER))
                if answer is not None and answer.request == self._name and answer.rank == rank:
                    found[rank] = answer
            if ranks <= found.keys() or time.monotonic() >= until:
                return found
            time.sleep(0.05)


def _read(file: Path, most: int, *, owner: int | None = None) -> dict[str, Any] | None:
    """Return the object that a small regular file holds, of an owner where one is named; no link is followed."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            known = os.fstat(descriptor)
            if not stat.S_ISREG(known.st_mode) or known.st_size > most or owner not in {None, known.st_uid}:
                return None
            value = json.loads(opened.read(most + 1))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
