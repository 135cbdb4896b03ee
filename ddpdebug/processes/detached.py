"""Starts a process of ddpdebug that outlives a rank: no child of it, in a session of its own. Torch-free.

It has none of the job's streams, folders or variables, and nobody in the job can wait for it or hear of its end: what
starts it is a copy of the process that sends no signal and is gone at once. See docs/decisions/029 and 051.
"""

from __future__ import annotations

import ctypes
import operator
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain, compress, repeat
from typing import Any

from ddpdebug.clock import time
from ddpdebug.isolation.confinement import Confinement, UnconfinedError, clone, function

#: Seconds that the start may take.
_PATIENCE = 10.0
#: What the process needs to run at all, and to reach others.
_VARIABLES = ("LD_LIBRARY_PATH", "PATH", "SSL_CERT_DIR", "SSL_CERT_FILE")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
_PROGRAM = "import signal, sys\nsignal.alarm(0)\nsys.path.append({root!r})\nfrom {module} import main\nmain({words!r})"
_WALL = 0x40000000  # waits for children that send no signal, too
_CLOSE_RANGE, _SET_FLAGS, _LAST = 436, 2, 0xFFFFFFFF  # the call's number, fcntl's F_SETFD, the highest descriptor
_FAILED = 127
_GET_CHILD_SUBREAPER = 37
_call: Callable[[Any], Any] = operator.call  # `map` has no type for it


def start(module: str, words: tuple[Any, ...], files: tuple[int, ...]) -> None:
    """Start a process that calls `main(words)` of a module.

    Args:
        files: descriptors that it gets.

    Raises:
        OSError: it did not start.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    program = _PROGRAM.format(root=root, module=module, words=words)
    command = [sys.executable, "-I", "-S", "-c", program]
    environ = {name: os.environ[name] for name in (*_VARIABLES, *_PROXIES) if name in os.environ}
    null = os.open(os.devnull, os.O_RDWR)
    try:
        stays = _adopts()
        row = (
            clone(),
            _copied_again(stays=stays),
            *_steps(command, environ, null, {number for number in files if number >= 0}).steps,
        )
        _copy(row, stays=stays)
    except UnconfinedError as error:
        raise OSError(f"the process for it did not start: {error}") from None
    finally:
        os.close(null)


def _steps(command: list[str], environ: dict[str, str], null: int, files: set[int]) -> Confinement:
    """Return what the process does before it becomes another program."""
    found = Confinement()
    found.add("alarm", int(_PATIENCE))  # a lock of the C library that another thread had taken is never let go there
    found.add("setsid")
    for number in {0, 1, 2} - files:
        found.add("dup2", null, number)
    for number in files:
        found.add("fcntl", number, _SET_FLAGS, 0)
    edges = sorted(files | {0, 1, 2})
    for low, high in zip(edges, [*edges[1:], _LAST + 1], strict=True):
        if low + 1 < high:
            found.add("syscall", _CLOSE_RANGE, low + 1, high - 1, 0)
    found.add("chdir", b"/")
    words = [os.fsencode(word) for word in command]
    variables = [os.fsencode(f"{name}={value}") for name, value in environ.items()]
    found.add("execve", words[0], _array(words), _array(variables))
    found.add("_exit", _FAILED)
    return found


def _array(words: list[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * (len(words) + 1))(*words, None)


def _adopts() -> bool:
    """Return whether processes whose parent has ended become children of this one: it is a container's first, say."""
    found = ctypes.c_int()
    function("prctl")(_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return os.getpid() == 1 or bool(found.value)


def _copied_again(*, stays: bool) -> Callable[[], object]:
    """Return the call that copies this process, and ends it: the copy goes on, and no code in Python runs here.

    It could wait for ever: where another thread wanted the interpreter at the moment of the first copy, whoever runs
    lets go of it, and waits until that thread has taken it, which is not in the copy.

    Args:
        stays: it ends only after its copy.
    """
    end = Confinement()
    if stays:
        end.add("setsid")
        end.add("syscall", _CLOSE_RANGE, 0, _LAST, 0)
        end.add("waitpid", -1, None, _WALL)
    end.add("_exit", 0)
    is_first = chain.from_iterable(map(repeat, map(_call, (clone(),))))  # the number of the copy, 0 in that
    return partial(any, map(_call, compress(end.steps, is_first)))


def _copy(row: tuple[Callable[[], object], ...], *, stays: bool) -> None:
    """Copy this process twice, the second time from the first copy, which ends.

    No code in Python runs in either: their own number, 0, leads on to their steps (`isolation/child.py`). A copy
    that sends no signal as it ends cannot become another program without sending one: that is why there are two.
    Where the second would become our child by the end of the first, the first stays between the two.
    """
    parent, pid = os.getpid(), -1
    try:
        pid = next(filter(None, map(_call, row)), 0)
    finally:
        if os.getpid() != parent:
            os._exit(0)
    if pid < 0:
        raise UnconfinedError("this process could not be copied")
    if stays:
        return
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        try:
            if os.waitpid(pid, os.WNOHANG | _WALL)[0]:
                return
        except ChildProcessError:  # somebody waits for children of all kinds
            return
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, _WALL)
    raise UnconfinedError("the copy did not end")
