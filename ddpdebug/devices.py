"""Access to a device beside the training: queries, copies through pinned memory, and detection of a device's failure.

Once CUDA has failed (a device-side assert, an illegal address) every question to it raises. So does memory that goes
back to torch's allocators: out of a destructor, which ends the process before the script's traceback is printed. Who
frees cannot know whether the device has failed just before. So pinned memory and events of ours are used again and
never given back, and once anybody has seen an error of a device (`failure`) nothing here asks it any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ddpdebug.clock import time
from ddpdebug.errors import DeviceFailedError, text_of
from ddpdebug.torch_internals import unlisted

#: The class that torch has for errors of devices since 2.8; before, and of libraries, they are known by their words.
_KIND: type[BaseException] | tuple[()] = getattr(torch, "AcceleratorError", ())
_WORDS = re.compile(r"\b(CUDA|HIP) error\b", re.IGNORECASE)
#: After these the device works as before.
_PASSING = re.compile(r"out of memory|captur", re.IGNORECASE)
_MOST_CAUSES = 10
#: Between two questions to a device, in seconds: soon, and then less and less often.
_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02
_SMALLEST = 256
_T = TypeVar("_T")


def keep(thing: object) -> None:
    """Keep an object alive until the process ends, also during the interpreter's shutdown."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def is_failure(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, says that the device cannot be used any more."""
    for _ in range(_MOST_CAUSES):
        if error is None:
            break
        text = text_of(error)
        told = isinstance(error, _KIND) or (isinstance(error, RuntimeError) and _WORDS.search(text) is not None)
        if isinstance(error, DeviceFailedError) or (told and not _PASSING.search(text.partition("\n")[0])):
            return True
        error = error.__cause__ or error.__context__
    return False


class Failure:
    """The failure of a device of this process, which is final: no query is sent to a device after it."""

    def __init__(self) -> None:
        self.failed, self.text = False, ""
        self._noting = threading.Lock()
        self._calls: list[Callable[[], object]] = []

    def note(self, error: BaseException | None) -> bool:
        """Record an error if it is a device's failure, and return whether it is; the first one is announced."""
        if not is_failure(error):
            return False
        with self._noting:
            first, self.failed = not self.failed, True
        if first:
            self.text = text_of(error).partition("\n")[0] if error is not None else ""
            for call in tuple(self._calls):
                with contextlib.suppress(Exception):  # the error that is on its way says more
                    call()
        return True

    def when(self, call: Callable[[], object]) -> None:
        """Register a callback for the moment at which a failure of a device is noticed, in whatever thread."""
        self._calls.append(call)

    def forget(self, call: Callable[[], object]) -> None:
        """Remove a callback."""
        if call in self._calls:
            self._calls.remove(call)

    def check(self) -> None:
        """Raise DeviceFailedError if a device has failed."""
        if self.failed:
            raise DeviceFailedError(self.text)


failure = Failure()


class Captures:
    """CUDA graph captures in progress: a device query from any thread would spoil a capture."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._number = 0

    def change(self, by: int) -> None:
        """Note that a capture begins (1) or ends (-1); one that begins waits until no query is under way."""
        with self._asking:
            self._number = max(0, self._number + by)

    @property
    def in_progress(self) -> bool:
        """Whether a capture is in progress."""
        return self._number > 0

    def ask(self, question: Callable[[], _T]) -> _T | None:
        """Send a query to the device and return the answer; None during a capture.

        Raises:
            DeviceFailedError: it has failed before.
        """
        failure.check()
        try:
            with self._asking:
                return None if self._number else question()
        except Exception as error:
            failure.note(error)
            raise

    def is_reached(self, event: Any) -> bool:
        """Whether an event has been reached; False during a capture."""
        return bool(self.ask(event.query))

    def wait_for(self, event: Any) -> None:
        """Wait until an event has been reached; only off the hot path."""
        pause = _PAUSE
        while not self.is_reached(event):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


captures = Captures()


def arrival(device: torch.device, event: torch.Event | None = None) -> torch.Event:
    """Return an event that is reached when a device has finished the work queued on its current stream so far.

    Without the stream torch records it on the current device's, which need not be this one.
    """
    event = event or torch.Event(device=device, enable_timing=False)
    event.record(torch.accelerator.current_stream(device))
    return event


class _Pinned:
    """A piece of pinned memory, for one copy at a time, and the event after the newest."""

    __slots__ = ("event", "memory", "pool")

    def __init__(self, pool: deque[_Pinned], size: int, *, pinned: bool) -> None:
        self.pool = pool
        self.event: torch.Event | None = None
        with torch.inference_mode(mode=False):  # what is made within could not be written to outside
            self.memory = unlisted(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned))


class Copy:
    """A copy in progress between a device and the host; its pinned memory is used again by later copies."""

    __slots__ = ("_arrived", "_piece", "host")

    def __init__(self, like: torch.Tensor, device: torch.device) -> None:
        self._arrived, self._piece = False, _piece(device, like.nbytes)
        #: as large as the tensor; of use as long as the copy is
        self.host = unlisted(self._piece.memory[: like.nbytes].view(like.dtype).view(like.shape))

    def begun(self, device: torch.device) -> None:
        """Note that the copy was queued on the device's current stream."""
        before = self._piece.event
        self._piece.event = arrival(device, before)
        if before is None:
            keep(self._piece.event)

    def wait(self) -> None:
        """Wait until the copy has arrived; only off the hot path."""
        if not self._arrived:
            captures.wait_for(self._piece.event)
            self._arrived = True

    def __del__(self) -> None:
        """Leave the memory to the next one."""
        if (piece := getattr(self, "_piece", None)) is not None:
            piece.pool.append(piece)


_pools: dict[tuple[torch.device, int], deque[_Pinned]] = {}


def _piece(device: torch.device, nbytes: int) -> _Pinned:
    """Return memory that no copy uses: the piece that was used longest ago, or a new one."""
    failure.check()
    size = max(_SMALLEST, 1 << max(0, nbytes - 1).bit_length())
    pool = _pools.setdefault((device, size), deque())
    try:
        piece = pool.popleft()
    except IndexError:
        piece = None
    if piece is not None:
        if piece.event is None or captures.is_reached(piece.event):  # nobody has waited for it, perhaps
            return piece
        pool.appendleft(piece)
    piece = _Pinned(pool, size, pinned=device.type == "cuda")
    keep(piece.memory)
    return piece


def to_host(tensor: torch.Tensor) -> Copy:
    """Start a copy of a device tensor's present values to the host, without waiting."""
    copy = Copy(tensor, tensor.device)
    copy.host.copy_(tensor.detach(), non_blocking=True)  # no graph goes into memory that is used again
    copy.begun(tensor.device)
    return copy


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a host tensor on a device, without waiting."""
    copy = Copy(tensor, device)
    copy.host.copy_(tensor)
    there = copy.host.to(device, non_blocking=True)
    copy.begun(device)
    return there
