"""Numbers that may still be on a device: copied out without waiting, read later in the background thread."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence

import torch

from ddpdebug import fingerprint
from ddpdebug.device_fingerprint import device_fingerprints

#: Something that yields numbers when they are needed; calling it may wait for the device, so only off the hot path.
Later = Callable[[], list[int]]
LaterFloats = Callable[[], list[float]]


#: Between two questions to a device, in seconds: soon, and then less and less often.
_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02


class _Captures:
    """Captures of CUDA graphs in progress: a question to the device, from whatever thread, would spoil one."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._number = 0

    def change(self, by: int) -> None:
        """Note that one begins or ends; one that begins waits until nobody asks."""
        with self._asking:
            self._number = max(0, self._number + by)

    def wait_for(self, event: torch.Event) -> None:
        """Return once the event has been reached; only off the hot path."""
        pause = _PAUSE
        while True:
            with self._asking:
                if not self._number and event.query():
                    return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


captures = _Captures()


def _detached_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    host.copy_(tensor, non_blocking=True)
    event = torch.Event(device=tensor.device)
    event.record()
    return host, functools.partial(captures.wait_for, event)


def digests(tensors: Sequence[torch.Tensor | None]) -> Later:
    """Fingerprint tensors where they are; None has the digest 0. CPU tensors are read now, others asynchronously."""
    if all(t is None or t.device.type == "cpu" for t in tensors):
        values = fingerprint.fingerprints([t for t in tensors if t is not None])
        if len(values) != len(tensors):
            found = iter(values)
            values = [0 if t is None else next(found) for t in tensors]
        return lambda: values
    here = {i: t for i, t in enumerate(tensors) if t is not None and t.device.type == "cpu"}
    there = {i: t for i, t in enumerate(tensors) if t is not None and t.device.type != "cpu"}
    near = dict(zip(here, fingerprint.fingerprints(list(here.values())), strict=True))
    host, wait = _detached_copy(device_fingerprints(list(there.values())))
    number, places = len(tensors), list(there)

    def read() -> list[int]:  # holds no tensor of the job: it is read late, and kept for longer
        wait()
        far = dict(zip(places, (v & fingerprint.MASK or fingerprint.NEVER_ZERO for v in host.tolist()), strict=True))
        return [near.get(i, far.get(i, 0)) for i in range(number)]

    return read


def glances(tensors: Sequence[torch.Tensor]) -> Later | None:
    """Like `digests`, but large tensors are only sampled; None where that is not cheap (not on the CPU)."""
    if any(t.device.type != "cpu" for t in tensors):
        return None
    values = [fingerprint.glance(t) for t in tensors]
    return lambda: values


def numbers(scalars: Sequence[torch.Tensor]) -> LaterFloats:
    """Read zero-dimensional tensors later; each must be a fresh result that nobody changes in place."""
    if not scalars:
        return list
    if scalars[0].device.type == "cpu":
        return lambda: [float(s) for s in scalars]
    alike = all(s.dtype == scalars[0].dtype for s in scalars)  # then a launch each is saved
    stacked = torch.stack(list(scalars)).to(torch.float64) if alike else torch.stack([s.double() for s in scalars])
    host, wait = _detached_copy(stacked)

    def read() -> list[float]:
        wait()
        return [float(v) for v in host.tolist()]

    return read
