"""A process beside this one, and the connection to it."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from ddpdebug.processes.beside import Beside

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has what it needs")


def test_it_starts_while_other_threads_want_the_interpreter() -> None:
    """Who is asked to let go of it in a copy of a process waits there for a thread that takes it: there is none."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(100))

    threads = [threading.Thread(target=spin) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            Beside("ddpdebug.companion.process", os.getpid(), channels=2).close()
    finally:
        over.set()
        for thread in threads:
            thread.join()
