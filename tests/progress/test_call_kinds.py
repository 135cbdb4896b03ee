"""What a line waits in, by its words."""

from __future__ import annotations

import sys
import threading

from machine import until

from ddpdebug.progress import frames


def test_an_argument_that_is_called_input_is_no_question() -> None:
    """As in `F.linear(input, weight)`: nobody is asked for anything there."""
    lock = threading.Lock()
    lock.acquire()

    def waits(hold: object, input: int) -> None:  # noqa: A002 - it is the name that matters
        hold(input)  # type: ignore[operator]

    thread = threading.Thread(target=waits, args=(lock.acquire, 1))
    thread.start()
    ident = thread.ident
    assert ident is not None
    try:
        assert until(lambda: frames.look(frames.take(sys._current_frames().get(ident))).does == "hold(input)")
        assert frames.look(frames.take(sys._current_frames().get(ident))).kind == ""
    finally:
        lock.release()
        thread.join()
