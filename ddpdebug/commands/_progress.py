"""A progress line on a terminal for work that takes long. Torch-free."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ddpdebug.clock import time
from ddpdebug.isolation.background import Thread
from ddpdebug.printing import write

#: What takes less is not worth a line.
_PATIENCE_SECONDS = 2.0
_EVERY_SECONDS = 1.0
_CLEAR_LINE = "\r\x1b[K"


@contextmanager
def progress(words: str) -> Iterator[Callable[[str], None]]:
    """Show a text and the time passed on a terminal while the context lasts; show nothing if there is no terminal.

    What is yielded takes other words.
    """
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield lambda _: None
        return
    shown, over, begun = [words], threading.Event(), time.monotonic()

    def show() -> None:
        wait = _PATIENCE_SECONDS
        while not over.wait(wait):
            wait = _EVERY_SECONDS
            with suppress(OSError, ValueError):
                write(stream, f"{_CLEAR_LINE}ddpdebug: {shown[0]} · {time.monotonic() - begun:.0f} s")
        if wait != _PATIENCE_SECONDS:
            with suppress(OSError, ValueError):
                write(stream, _CLEAR_LINE)

    thread = Thread("ddpdebug-progress", show)
    try:
        yield lambda text: shown.__setitem__(0, text)
    finally:
        over.set()
        thread.join()
