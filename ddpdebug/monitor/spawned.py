"""Attaching to ranks that a watched script starts itself, by `torch.multiprocessing` or `multiprocessing`.

In the script's process `Starts` puts a `Running` in the place of the process object's `run` while it starts. In the
new process, spawned, forked or from a fork server, that calls the process's own `run` and nothing else, until a process
group comes into being: then this is a rank, and is attached to. What never joins a group is no rank. See
docs/decisions/022.
"""

from __future__ import annotations

import importlib.machinery
import json
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdebug.errors import StopRun, text_of
from ddpdebug.printing import be_launched, file_of, say
from ddpdebug.processes import stacks

if TYPE_CHECKING:
    from ddpdebug.config.settings import Config

#: Without it there is no process group in a process, and none that could come without an import.
_GROUPS = "torch.distributed.distributed_c10d"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The facts about its run that a rank started by the script needs.

    Args:
        config: the settings, with the run directory that all such ranks share.
        number: of the monitor, among those of its process: the ranks' n-th ones belong together.
        as_check: the script runs under `ddpdebug check`.
        notes: a folder in which each rank notes that it is one, for the process that has started it.
        attach: attaches to the process, and returns the monitor, or None where the script does so by itself.
    """

    config: Config
    command: tuple[str, ...]
    run_id: str
    number: int
    as_check: bool
    notes: Path
    attach: Callable[[Origin], Any]


class Running:
    """Replacement for `Process.run` that attaches ddpdebug in the child; picklable, and light to load."""

    def __init__(self, origin: bytes) -> None:
        self._origin = origin  # loaded by a rank only

    def __call__(self) -> None:
        """Run the process as it would run without ddpdebug; its exceptions carry no frame of ours."""
        process = multiprocessing.process.current_process()
        vars(process).pop("run", None)
        arrival = Arrival(self._origin)
        arrival.await_group()
        try:
            process.run()
        except StopRun:
            arrival.leave("stopped", 0)
        except BaseException as error:
            if error.__traceback__ is not None:
                error.__traceback__ = error.__traceback__.tb_next
            arrival.leave_by(error)
            raise
        else:
            arrival.leave("finished", 0)


class Arrival:
    """The life of one started process as a possible rank: attached when it joins a process group, closed at its end."""

    def __init__(self, origin: bytes) -> None:
        self._origin = origin
        self._monitor: Any = None
        self._pid, self._errors = os.getpid(), file_of(2)
        self._entries: Any = None

    def await_group(self) -> None:
        """Register a callback for the creation of a process group; load nothing if torch is not loaded."""
        if _GROUPS not in sys.modules:
            return
        with suppress(Exception):  # nothing of ours keeps a process from running
            from ddpdebug import torch_internals as internals  # noqa: PLC0415 - a process that never trains needs none
            from ddpdebug.isolation.guard import Guard  # noqa: PLC0415
            from ddpdebug.probes.entries import entries_of  # noqa: PLC0415

            self._entries = entries_of(Guard(_tell))
            what = "ranks that the script starts"
            where = internals.group_module(), internals.UPDATE_DEFAULT_GROUP
            self._entries.patch(*where, what, after=[("attach", self._group_set)])

    def _group_set(self, _: Any, group: Any = None) -> None:
        if group is None or self._entries.closed or os.getpid() != self._pid:
            return
        self._entries.close()
        be_launched(self._errors)
        origin: Origin = pickle.loads(self._origin)  # noqa: S301 - made by the process that has started this one
        self._monitor = origin.attach(origin)

    def leave(self, reason: str, exit_code: int | None, error: BaseException | None = None) -> None:
        """Close the monitor, if one was attached."""
        monitor, self._monitor = self._monitor, None
        if monitor is not None and os.getpid() == self._pid:
            monitor.close(reason, exit_code, error)

    def leave_by(self, error: BaseException) -> None:
        """Close the monitor because of an exception that ends the process."""
        if isinstance(error, SystemExit):
            given = error.code if type(error).code is SystemExit.code else 1  # a property of the script's counts, maybe
            code = given if isinstance(given, int) else int(given is not None)
            cause = error.__context__  # torch leaves so, once it has kept the error for the process that waits
            if code and cause is not None:
                self.leave(_reason(cause), code, cause)
            else:
                self.leave("finished" if code == 0 else f"exception: SystemExit: {given}", code, error)
        elif isinstance(error, KeyboardInterrupt):
            self.leave("interrupted", 130, error)
        else:
            self.leave(_reason(error), 1, error)


def _reason(error: BaseException) -> str:
    return f"exception: {text_of(error)}"


def _tell(part: str, message: str) -> None:
    del part
    say(f"ddpdebug: could not attach to process {os.getpid()}, it runs without it: {message}\n")


class Starts:
    """The processes that the script starts, and the ranks among them.

    Args:
        origin: makes what they must know, with their folder for notes.
        is_rank: tells whether this process is one rank of several itself; its children are then no ranks of the run.
    """

    def __init__(self, origin: Callable[[Path], Origin], is_rank: Callable[[], bool]) -> None:
        self._make, self._is_rank = origin, is_rank
        self._origin: Origin | None = None
        self._pickled = b""
        self._pid = os.getpid()
        self._started: list[weakref.ref[Any]] = []
        self._ranks: dict[int, Any] = {}  # process objects of those that are known to be ranks, by their rank

    def before(self, process: Any) -> None:
        """Prepare a process that is about to start, so that ddpdebug attaches once it joins a group."""
        if self._is_rank() or "run" in vars(process) or not _loads_the_same():
            return
        if self._origin is None:
            self._origin = self._make(_folder())
            self._pickled = pickle.dumps(self._origin)
        vars(process)["run"] = Running(self._pickled)

    def after(self, process: Any) -> None:
        """Undo `before`, after the process has started or failed to."""
        if isinstance(vars(process).get("run"), Running):
            del vars(process)["run"]
            self._started = [ref for ref in self._started if ref() is not None]
            self._started.append(weakref.ref(process))

    def ranks(self) -> dict[int, Any]:
        """Return the process objects of started ranks, by rank."""
        if self._origin is None:
            return {}
        for process in [process for ref in tuple(self._started) if (process := ref()) is not None]:
            with suppress(OSError, ValueError):  # it has left no note, or was closed
                rank = int((self._origin.notes / str(process.pid)).read_text(encoding="ascii"))
                self._ranks[rank] = process
        return self._ranks

    @property
    def any_ranks(self) -> bool:
        """Whether a started process has become a rank, even if its process object is gone."""
        if self._origin is None:
            return False
        with suppress(OSError):
            return bool(self.ranks()) or any(self._origin.notes.iterdir())
        return bool(self._ranks)

    @property
    def has_run(self) -> bool:
        """Whether the run is that of started processes: some are ranks, or may become ranks yet."""
        return self.any_ranks or any([_lives(process) for ref in self._started if (process := ref()) is not None])

    def close(self) -> None:
        """Delete the notes, once the ranks are known."""
        if self._origin is not None and os.getpid() == self._pid:
            self.ranks()
            shutil.rmtree(self._origin.notes, ignore_errors=True)

    def account(self) -> tuple[Path, dict[int, int]] | None:
        """Return the ranks' run directory and their exit statuses, negative for a signal; None without such ranks."""
        if self._origin is None or self._origin.config.out is None or not self._ranks:
            return None
        statuses: dict[int, int] = {}
        for rank, process in self._ranks.items():
            with suppress(ValueError, AssertionError):  # it was closed
                if process.exitcode is not None:
                    statuses[rank] = process.exitcode
        return self._origin.config.out, statuses


#: Folders for temporary files that `TMPDIR` is seldom one of.
_TEMPORARY = ("/var/tmp", "/dev/shm")  # noqa: S108 - `mkdtemp` makes it safe


def _folder() -> Path:
    """Make a folder for temporary files, where they can be beside those of the script, which may look at its own.

    Which folder the script uses stays to be found out, in a forked process too.
    """
    chosen = tempfile.tempdir
    try:
        for beside in _TEMPORARY:
            with suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="ddpdebug-", dir=beside))
        return Path(tempfile.mkdtemp(prefix="ddpdebug-"))
    finally:
        tempfile.tempdir = chosen


def note(origin: Origin | None, rank: int) -> None:
    """Note for the parent process that this one is a rank; do nothing without an origin."""
    if origin is None:
        return
    if origin.as_check:
        stacks.arm_spawned(os.environ, rank)
    with suppress(OSError):  # that one has ended
        (origin.notes / str(os.getpid())).write_text(str(rank), encoding="ascii")


def keep(directory: Path, name: str, statuses: dict[int, int]) -> None:
    """Write exit statuses for the judge of the run; if that fails they stay unknown."""
    with suppress(OSError):
        (directory / name).write_text(json.dumps({str(rank): code for rank, code in statuses.items()}), "ascii")


def _lives(process: Any) -> bool:
    """Whether a process runs, without taking its exit status from the one who waits for it."""
    try:
        return not multiprocessing.connection.wait([process.sentinel], 0)
    except (OSError, ValueError):
        return False


def _loads_the_same() -> bool:
    """Whether a new interpreter finds this ddpdebug: what it cannot load would end it."""
    executable = multiprocessing.spawn.get_executable()
    if executable is not None and os.fsdecode(executable) != sys.executable:
        return False
    here = str(Path(__file__).parent.parent / "__init__.py")
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find("ddpdebug", None)
        if isinstance(spec, importlib.machinery.ModuleSpec):
            return spec.origin is not None and Path(spec.origin).samefile(here)
    return False
