"""The thread that is followed: one that trains. Steps of other threads are left alone.

What belongs to a step (its batch, its gradients, the lines that ran) is told apart by nothing but the order of events,
so the events of two threads would be mixed up, and gradients would be read while another thread writes them. The first
thread that trains is followed until it ends. Where ranks are compared, all must follow the same one of several threads:
the one of the first model.

To read is not safe either. `p.grad = None`, as in `zero_grad`, lets go of the interpreter's lock while it frees the
gradient, and `p.grad` still leads to it (torch 2.13): a thread that reads `p.grad` at that moment gets what is being
freed, and the process ends by a signal. So `.grad` is read of what this thread itself trains, in its own events, and of
anything else only inside of `alone`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

#: How long a thread waits for another's look to end before it trains regardless, in seconds: a look takes microseconds.
_PATIENCE = 1.0


def always_alone() -> AbstractContextManager[bool]:
    """Return a context that replaces `Threads.alone` if there is only one thread."""
    return nullcontext(True)


class Threads:
    """The followed thread.

    Args:
        tell: takes (part, message) about what is not looked at.
    """

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self.ident: int | None = None
        self.several = False  # another one trains too: what is counted for the whole process is counted no more
        self.compared = False  # between ranks
        self._thread: threading.Thread | None = None
        self._tell = tell
        self._changing = threading.RLock()  # a signal handler of the looking thread may train

    def is_here(self) -> bool:
        """Return whether this is the followed thread, or may still become it."""
        return self.ident is None or self.ident == threading.get_ident()

    def watched(self) -> int:
        """Return the identity of the thread whose place represents the rank: the followed one, else the main one."""
        main = threading.main_thread().ident or 0
        return self.ident if self.ident is not None and self._lives() else main

    def begins(self, model: int | None = None) -> bool:
        """Return whether the thread that trains now is the followed one; the first to train becomes it.

        Args:
            model: the number of the DDP that runs, None where it is not known.
        """
        if self.ident == threading.get_ident():
            return True
        if self.several and self._lives():
            return False
        taken = self._changing.acquire(timeout=_PATIENCE)
        try:
            if (self.ident is None or not self._lives()) and (not self.compared or self._is_alike(model)):
                self._thread, self.ident = threading.current_thread(), threading.get_ident()
                return True
            first, self.several = not self.several, True
        finally:
            if taken:
                self._changing.release()
        if first:
            followed = "the first model's" if self._thread is None else repr(self._thread.name)
            self._tell(
                "threads",
                f"several threads train at the same time; only {followed} is followed, and what thread "
                f"{threading.current_thread().name!r} and any further one do is not checked",
            )
        return False

    def alone(self) -> AbstractContextManager[bool]:
        """Return a context: whether only this thread trains; no other begins to before the block ends."""
        return _Alone(self, self._changing)

    def may_build(self) -> bool:
        """Return whether a model built in this thread gets the same number on every rank."""
        return not self.compared or all([t is threading.main_thread() for t in self._others()])

    def is_autograd(self) -> bool:
        """Return whether this is one of torch's own threads, which works for the caller of backward."""
        ident = threading.get_ident()
        known = next(iter([thread for thread in threading.enumerate() if thread.ident == ident]), None)
        return known is None or type(known).__name__ == "_DummyThread"

    def _lives(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _is_alike(self, model: int | None) -> bool:
        """Return whether this thread would be chosen on every rank, whichever of them is the first there."""
        others = list(self._others())
        if not others or model == 0:
            return True
        # the main thread mostly waits for the one that trains; what owns no DDP has no number
        return model is None and others == [threading.main_thread()]

    @staticmethod
    def _others() -> Iterator[threading.Thread]:
        """Yield the threads that may train as well; helpers (loaders, loggers, ours) are daemons."""
        own = threading.current_thread()
        return (t for t in threading.enumerate() if t is not own and not t.daemon)


class _Alone(AbstractContextManager[bool]):
    """One look. A class: as a generator it would take three times as long, some times in each step."""

    __slots__ = ("_changing", "_of", "_taken")

    def __init__(self, threads: Threads, changing: threading.RLock) -> None:
        self._of, self._changing, self._taken = threads, changing, False

    def __enter__(self) -> bool:
        threads = self._of
        if threads.several:
            return False
        self._taken = self._changing.acquire(timeout=_PATIENCE)
        return self._taken and threads.is_here() and not threads.several

    def __exit__(self, *_: object) -> None:
        if self._taken:
            self._changing.release()
