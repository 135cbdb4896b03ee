"""Watches directories on a file system shared with the jobs for runs, and brings the store up to date.

One thread reads all of them. What it knows of a run directory is a copy of what the store knows, so it may be stopped
at any point.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from ddpdebug.clock import time
from ddpdebug.hub.store import NotWantedError, Store, copy_run
from ddpdebug.run_directory.mirror import RUN, Mirror, digest_of

#: Seconds between two looks at runs that go on, at those that are over, and for new ones.
_EVERY, _OVER, _SEARCH = 2.0, 60.0, 10.0
#: A directory in which nothing was written for so many seconds is not held open.
_OLD = 600.0
#: Directories below one that is watched, and how deep they may lie.
_MOST, _DEEPEST = 50_000, 6


class Watch:
    """The runs below some directories.

    Args:
        keep: what was last written longer ago than so many seconds is not looked at.
        failed: called with what could not be read or stored, once for each directory and reason.
    """

    def __init__(
        self,
        store: Store,
        roots: Sequence[Path],
        keep: float = float("inf"),
        failed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store, self._roots, self._keep, self._failed = store, roots, keep, failed
        self._mirrors: dict[Path, Mirror] = {}  # runs that go on
        self._over: dict[Path, tuple[int, int, float]] = {}  # `run.json` as it was, and when that was looked at
        self._known: list[Path] = []
        self._next_search = float("-inf")
        self._said: set[str] = set()
        if roots:
            store.passed = store.clock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdebug-hub-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch, in a thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        for mirror in self._mirrors.values():
            mirror.close()

    def look(self) -> None:
        """Look at all directories once."""
        begun = self._store.clock()
        if time.monotonic() >= self._next_search:
            self._known = [path for root in self._roots for path in runs_below(root)]
            self._next_search = time.monotonic() + _SEARCH
        for directory in self._known:
            if self._stop.is_set():
                return
            try:
                self._look_at(directory)
            except (OSError, ValueError, NotWantedError) as error:  # unreadable, another run, or not wanted
                if directory not in self._mirrors or isinstance(error, NotWantedError):
                    self._set_aside(directory)
                self._let_go(directory)
                self._say(f"{directory}: {error}")
            except SQLAlchemyError as error:  # no room, for now
                self._say(f"cannot store {directory}: {str(getattr(error, 'orig', error))[:200]}")
            except Exception as error:  # noqa: BLE001 - whatever one directory holds, the others are watched
                self._let_go(directory)
                self._say(f"cannot show {directory}: {type(error).__name__}: {str(error)[:200]}")
        if self._roots:
            self._store.passed = begun

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - the thread must live on
                self._say(f"cannot look for runs: {type(error).__name__}: {str(error)[:200]}")
            self._stop.wait(_EVERY)

    def _look_at(self, directory: Path) -> None:
        info = (directory / RUN).lstat()
        signature, now = (info.st_ino, info.st_mtime_ns), time.monotonic()
        before = self._over.get(directory)
        if before is not None and before[:2] == signature and now - before[2] < _OVER:
            return
        mirror = self._mirrors.get(directory)
        first = mirror is None
        if mirror is None:
            if self._store.clock() - info.st_mtime > self._keep:
                self._over[directory] = (*signature, now)
                return
            mirror = self._mirrors[directory] = Mirror(directory)
            if self._store.is_over(mirror.key, digest_of((directory / RUN).read_bytes())):
                self._let_go(directory)
                self._over[directory] = (*signature, now)
                return
        at = mirror.changed if first else None  # what is there at the first look was written when the files say
        changed = copy_run(self._store, mirror, "watch", at=at)
        old = at is not None and self._store.clock() - at > _OLD
        if old or (not changed and self._store.is_over(mirror.key)):
            self._let_go(directory)
            self._over[directory] = (*signature, now)

    def _set_aside(self, directory: Path) -> None:
        """Look at a directory again when its `run.json` is another one, and seldom until then."""
        with suppress(OSError):
            info = (directory / RUN).lstat()
            self._over[directory] = (info.st_ino, info.st_mtime_ns, time.monotonic())

    def _let_go(self, directory: Path) -> None:
        if (mirror := self._mirrors.pop(directory, None)) is not None:
            mirror.close()

    def _say(self, message: str) -> None:
        if message not in self._said and len(self._said) < 1000:
            self._said.add(message)
            self._failed(message)


def runs_below(root: Path) -> Iterator[Path]:
    """Yield the run directories in a directory, itself included; links are not followed."""
    waiting, seen = [(root, 0)], 0
    while waiting and seen < _MOST:
        directory, depth = waiting.pop()
        seen += 1
        with suppress(OSError), os.scandir(directory) as entries:
            names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries if entry.name[:1] != "."}
            is_run = names.get(RUN) is False and stat.S_ISREG((directory / RUN).lstat().st_mode)
            if is_run:
                yield directory
            below = (name for name, is_directory in names.items() if is_directory and depth < _DEEPEST)
            # in a run only what was there before it, and what its ranks have started
            wanted = (name for name in below if not is_run or name == "spawned" or name.startswith("previous-"))
            waiting += [(directory / name, depth + 1) for name in sorted(wanted)]
