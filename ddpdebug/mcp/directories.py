"""Runs in given directories of this machine, found by name.

Only what lies in these is read, also through links.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ddpdebug.errors import UsageError
from ddpdebug.run_directory.reader import RUN, read_run

_DEEP, _MAX_ENTRIES = 3, 200_000


class Directories:
    """The runs in some directories, up to three folders deep.

    Args:
        roots: where runs, and scripts that may be checked, lie.

    Raises:
        UsageError: one of them is no directory.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        for root in roots:
            if not root.is_dir():
                raise UsageError(f"there is no directory {str(root)!r}")
        self._roots = tuple(dict.fromkeys(root.resolve() for root in roots))

    def newest(self, most: int) -> tuple[Sequence[str], int]:
        """Return the names of the newest runs, and the number of all runs."""
        found = sorted(self._found(), key=lambda item: -item[1])
        return [self._name(path) for path, _ in found[:most]], len(found)

    @contextmanager
    def opened(self, name: str, *, brief: bool = False) -> Iterator[Path]:
        """Yield a run's directory if none of its files is a link that leads out."""
        directory, root = self.inside(name)
        if not directory.is_dir():
            raise UsageError(f"{name[:200]!r} is no run directory; list_runs names them")
        for count, entry in enumerate(_entries(directory)):
            if count >= _MAX_ENTRIES:
                raise UsageError(f"{name[:200]!r} has too many files")
            if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
                raise UsageError(f"{name[:200]!r} has a link that leads out of the directories that are served")
        read_run(directory)
        yield directory

    def known(self, name: str) -> Mapping[str, Any]:
        """Return an empty mapping: all facts about a run are in its directory."""
        return {}

    def inside(self, name: str) -> tuple[Path, Path]:
        """Return the path that a name stands for in one of the roots, with all links resolved, and that root."""
        if name and "\0" not in name and len(name) < 4096:
            for root in self._roots:
                with suppress(OSError, RuntimeError):
                    path = (root / name).resolve(strict=True)
                    if path.is_relative_to(root):
                        return path, root
        raise UsageError(f"there is no {name[:200]!r} in the directories that are served")

    def _name(self, directory: Path) -> str:
        root = next(root for root in self._roots if directory.is_relative_to(root))
        return directory.relative_to(root).as_posix()

    def _found(self) -> Iterator[tuple[Path, float]]:
        seen = set[Path]()
        for root in self._roots:
            for depth in range(_DEEP + 1):
                for file in root.glob("/".join(["*"] * depth + [RUN])):
                    directory = file.parent.resolve()
                    if directory not in seen and directory.is_relative_to(root):
                        seen.add(directory)
                        with suppress(OSError):
                            yield directory, file.stat().st_mtime


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield everything below a directory, links unfollowed."""
    with os.scandir(directory) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))
