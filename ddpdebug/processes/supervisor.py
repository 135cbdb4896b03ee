"""Runs a command with a hard deadline; at its end, and on SIGTERM, no process of the command is left. Torch-free."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ddpdebug.clock import time

#: How long the processes have for their own ending before they are killed.
GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.5


class _Signalled(BaseException):
    """This process was asked to end."""


def supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    timeout: float,
    mark: str,
    *,
    late: Callable[[], None] | None = None,
    over: Callable[[], bool] = lambda: False,
) -> int | None:
    """Run `command` and return its exit status; None if it was ended, after `timeout` seconds or by `over`.

    When this process is interrupted or told to end, the command's processes end first.

    Args:
        mark: the name of a variable in `environ` whose value no other run has; processes that carry it belong to this
            run, whatever session they moved to.
        late: called when the time is over, before anything is ended.
        over: asked twice a second whether there is nothing to wait for any more.
    """
    token = f"{mark}={environ[mark]}".encode()
    with _end_on_signal():
        process = subprocess.Popen(command, env=dict(environ), start_new_session=True)  # noqa: S603 - our own words
        deadline = time.monotonic() + timeout
        try:
            while (left := deadline - time.monotonic()) > 0 and not over():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(left, _LOOK_SECONDS))
            if process.poll() is not None:
                return process.returncode
            if late is not None:
                late()
            return None
        finally:
            if _family(process, token):  # also what an ended command has left behind
                _end_all(process, token)


def _end_all(process: subprocess.Popen[bytes], token: bytes) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    for pid in _family(process, token):
        _send(pid, signal.SIGTERM)
    while time.monotonic() < deadline and _family(process, token):
        time.sleep(_POLL_SECONDS)
    for _ in range(3):  # what is killed may have started something at the last moment
        for pid in _family(process, token):
            _send(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    process.wait()


def _family(process: subprocess.Popen[bytes], token: bytes) -> list[int]:
    """Return the processes of the run that are alive; without /proc only the first one is known."""
    pids = {process.pid} if process.poll() is None else set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone, or somebody else's
            if token in entry.read_bytes().split(b"\0"):
                pids.add(int(entry.parent.name))
    return sorted(pids - {os.getpid()})


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


@contextlib.contextmanager
def _end_on_signal() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that the run is cleaned up, and die by them afterwards."""
    received: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> NoReturn:
        received.append(number)
        raise _Signalled

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except _Signalled:
        signal.signal(received[0], signal.SIG_DFL)
        os.kill(os.getpid(), received[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
