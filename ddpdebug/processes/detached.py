"""Starts a process of ours beside a rank that outlives it: nobody's child, in a session of its own. Torch-free.

It has none of the job's streams, folders or variables. See docs/decisions/029.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

#: Seconds that the start may take.
_PATIENCE = 10.0
#: What the process needs to run at all, and to reach others.
_VARIABLES = ("LD_LIBRARY_PATH", "PATH", "SSL_CERT_DIR", "SSL_CERT_FILE")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
_PROGRAM = """\
import os, sys
if os.fork():
    os._exit(0)
sys.path.append({root!r})
from {module} import main
main({words!r})
"""


def start(module: str, words: tuple[Any, ...], files: tuple[int, ...]) -> None:
    """Start a process that calls `main(words)` of a module; the one that starts it is reaped here at once.

    Args:
        files: descriptors that it gets.

    Raises:
        OSError: it did not start.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    try:
        process = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-I", "-S", "-c", _PROGRAM.format(root=root, module=module, words=words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: os.environ[name] for name in (*_VARIABLES, *_PROXIES) if name in os.environ},
            pass_fds=[fd for fd in files if fd >= 0],
            start_new_session=True,
        )
    except OSError as error:
        raise OSError(f"the process for it did not start: {error}") from None
    try:
        failed = process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        failed = process.wait()
    if failed:
        raise OSError("the process for it did not start")
