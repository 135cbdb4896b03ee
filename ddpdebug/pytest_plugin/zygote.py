"""The process that loads torch and pytest once and forks the ranks: `python zygote.py FD PARENT`.

Run by its path, so that the package is not loaded before pytest is: pytest must see it come. It stays without threads
and without anything of the user's, which is what makes forking safe. What it forks lives no longer than it does, and it
lives no longer than pytest: all that descends from it, whatever session it moved to, is killed at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pickle
import random
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 1.0


def main() -> None:
    """Serve the parent pytest until it ends: fork a rank, or end all ranks."""
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    setup = pickle.load(sys.stdin.buffer)  # noqa: S301 - written by the pytest that started us
    sys.path[:] = setup["path"]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _warm_up()

    def reap(*_: object) -> None:
        for pid, status in _ended():
            _say(control, {"kind": "exited", "pid": pid, "status": status})

    forked: set[int] = set()
    signal.signal(signal.SIGCHLD, reap)
    control.settimeout(_LOOK_SECONDS)
    while os.getppid() == parent:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        except TimeoutError:
            continue
        except OSError:
            break
        if not data:
            break
        command = json.loads(data)
        if command["kind"] == "sweep":
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _sweep(forked)
            signal.signal(signal.SIGCHLD, reap)
            _say(control, {"kind": "swept"})
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _be_rank(descriptors[0], command, setup)
        os.close(descriptors[0])
        forked.add(pid)
        _say(control, {"kind": "forked", "pid": pid, "number": command["number"]})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _sweep(forked)
    shutil.rmtree(setup["directory"], ignore_errors=True)  # pytest may have been killed


def _warm_up() -> None:
    """Load what every rank needs."""
    import pytest  # noqa: F401, PLC0415 - for the ranks
    import torch  # noqa: PLC0415
    import torch.distributed  # noqa: PLC0415
    import torch.nn.parallel  # noqa: PLC0415

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # the first optimizer loads half of torch
    gc.collect()
    gc.freeze()  # the ranks' collector has less to look at, and shares more of its memory


def _be_rank(descriptor: int, command: dict[str, Any], setup: dict[str, Any]) -> NoReturn:
    """Run a pytest session that gets its tests from `descriptor`."""
    code = 70
    try:
        zygote = os.getppid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # what a terminal sends is for pytest
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(code)
        _redirect(command["spool"])
        _reseed()
        code = _pytest_session(descriptor, command, setup)
    except BaseException:  # noqa: BLE001 - a forked child must not go back into the loop above
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _pytest_session(descriptor: int, command: dict[str, Any], setup: dict[str, Any]) -> int:
    from _pytest.config import Config  # noqa: PLC0415 - `fromdictargs` is made for processes like this one

    options = pickle.loads(setup["options"])  # noqa: S301 - as above
    config = Config.fromdictargs({**options, "basetemp": command["basetemp"]}, list(setup["args"]))
    # the common way to say "this is not the process that reports"; plugins look for it
    config.workerinput = {**setup["workerinput"], "workerid": command["name"]}  # type: ignore[attr-defined]
    config.ddpdebug_rank = {"descriptor": descriptor, **command}  # type: ignore[attr-defined]
    return int(config.hook.pytest_cmdline_main(config=config) or 0)


def _redirect(spool: str | None) -> None:
    """Write to `spool`, where the output survives the process; without one, to where pytest writes."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if spool is not None:
        file = os.open(spool, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")  # type: ignore[union-attr]


def _reseed() -> None:
    """Draw new seeds where a process of its own would have done so."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _ended() -> list[tuple[int, int]]:
    """Reap what has ended: process id and exit status, negative for a signal."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _sweep(forked: set[int]) -> None:
    """Kill all descendants. As the subreaper we inherit those whose parents are gone, so none gets away."""
    while True:
        alive = descendants(os.getpid()) or forked
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            if not descendants(os.getpid()):
                forked.clear()
                return


def descendants(root: int) -> list[int]:
    """Return the processes that descend from `root`; an empty list without /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # it has gone meanwhile
            parent = int(entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found: list[int] = []
    todo = [root]
    while todo:
        new = children.get(todo.pop(), [])
        found += new
        todo += new
    return found


def _say(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # pytest has gone; the loop notices
        control.send(json.dumps(message).encode())


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
