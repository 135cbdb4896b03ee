"""Numbers that may still be on a device: copied without waiting, read later in the background thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddpdebug import devices, fingerprint
from ddpdebug.device_fingerprint import device_fingerprints
from ddpdebug.isolation.user_code import is_users
from ddpdebug.torch_internals import inherits

#: Something that yields numbers when they are needed; calling it may wait for the device, so only off the hot path.
Later = Callable[[], list[int]]
LaterOne = Callable[[], int]
LaterFloats = Callable[[], list[float]]


#: Classes of tensors that are parts, or that a collective may still be writing: to wait for it is the job's matter.
_PARTS = ("DTensor", "ShardedTensor", "AsyncCollectiveTensor")
#: So many numbers are read by one operation.
_MANY = 16
_USUAL = fingerprint.PLAIN | {type(None)}


def _detached_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    copy = devices.to_host(tensor)
    return copy.host, copy.wait


class _Sampled:
    """The fingerprint of a sample that is on its way; the copy goes once it was read."""

    __slots__ = ("_found", "_waiting")

    def __init__(self, piece: torch.Tensor, finish: Callable[[torch.Tensor], int]) -> None:
        self._found = 0
        self._waiting: tuple[Any, ...] | None = (*_detached_copy(piece), finish)

    def __call__(self) -> int:
        waiting = self._waiting  # two threads may ask: both find the same
        if waiting is not None:
            host, wait, finish = waiting
            wait()
            self._found, self._waiting = finish(host), None
        return self._found


def sampled(tensor: torch.Tensor, limit: int) -> tuple[LaterOne, bool]:
    """Return `fingerprint.sampled_fingerprint` of a tensor, read later if the tensor is on a device.

    What is there and no single block of memory (sparse, nested) is waited for.
    """
    found = fingerprint.sample(tensor, limit)
    if found is None:
        value, is_sample = fingerprint.sampled_fingerprint(tensor, limit)
        return lambda: value, is_sample
    piece, finish, is_sample = found
    return _Sampled(piece, finish), is_sample


def digests(tensors: Sequence[torch.Tensor | None]) -> Later:
    """Fingerprint tensors on their device; None has the digest 0. CPU tensors are read now, others asynchronously.

    What is this rank's part of something has the same digest on all ranks, since nobody else has that part.
    """
    usual = {*map(type, tensors)} <= _USUAL
    parts = set() if usual else {i for i, tensor in enumerate(tensors) if _is_part(tensor)}
    if parts:
        rest = digests([None if i in parts else tensor for i, tensor in enumerate(tensors)])
        return lambda: [fingerprint.NO_DATA if i in parts else value for i, value in enumerate(rest())]
    if False not in {t is None or t.is_cpu for t in tensors}:
        values = fingerprint.fingerprints([t for t in tensors if t is not None])
        if len(values) != len(tensors):
            given = iter(values)
            values = [0 if t is None else next(given) for t in tensors]
        return lambda: values
    wrapped = [t is not None and t.device.type != "cpu" and hasattr(t, "__tensor_flatten__") for t in tensors]
    if any(wrapped):
        return _digests_of_wrapped(tensors, wrapped)
    found = [0] * len(tensors)
    copies: list[tuple[list[int], torch.Tensor, Callable[[], None]]] = []
    for place in {tensor.device for tensor in tensors if tensor is not None}:
        some = [(i, tensor) for i, tensor in enumerate(tensors) if tensor is not None and tensor.device == place]
        if place.type == "cpu":
            for (i, _), value in zip(some, fingerprint.fingerprints([tensor for _, tensor in some]), strict=True):
                found[i] = value
        else:
            host, wait = _detached_copy(device_fingerprints([tensor for _, tensor in some], is_users))
            copies.append(([i for i, _ in some], host, wait))
    return functools.partial(_read, found, copies)  # holds no tensor of the job: it is read late, and kept for longer


def _is_part(tensor: torch.Tensor | None) -> bool:
    """Return whether each rank has a tensor of its own by design, or one whose elements are still on their way."""
    kind = type(tensor)
    return kind not in fingerprint.PLAIN and inherits(kind, _PARTS)


def _digests_of_wrapped(tensors: Sequence[Any], wrapped: Sequence[bool]) -> Later:
    """Fingerprint what tensors are made of (quantised ones and their like), which may be made of others again."""
    parts: list[Any] = []
    numbers_of: list[int] = []
    for tensor, is_wrapped in zip(tensors, wrapped, strict=True):
        names = tensor.__tensor_flatten__()[0] if is_wrapped else ()
        some = [value for name in names if isinstance(value := getattr(tensor, name), torch.Tensor)]
        parts += some if is_wrapped else [tensor]
        numbers_of.append(len(some) if is_wrapped else -1)
    later = digests(parts)

    def read() -> list[int]:
        values = iter(later())
        return [next(values) if n < 0 else fingerprint.combine([next(values) for _ in range(n)]) for n in numbers_of]

    return read


def _read(found: list[int], copies: Sequence[tuple[list[int], torch.Tensor, Callable[[], None]]]) -> list[int]:
    values = found[:]
    for positions, host, wait in copies:
        wait()
        for i, value in zip(positions, host.tolist(), strict=True):
            values[i] = value & fingerprint.MASK or fingerprint.NEVER_ZERO
    return values


def glances(tensors: Sequence[torch.Tensor]) -> Later | None:
    """Fingerprint tensors as `digests` does, but only a sample of large ones; None if they are not on the CPU."""
    if False in {t.is_cpu for t in tensors}:
        return None
    small = False not in {t.nbytes <= fingerprint.GLANCE_BYTES for t in tensors}
    if small and {*map(type, tensors)} <= fingerprint.PLAIN:
        values = fingerprint.fingerprints(tensors)
    else:
        values = [fingerprint.NO_DATA if _is_part(t) else fingerprint.glance(t) for t in tensors]
    return lambda: values


def digests_and_glances(tensors: Sequence[torch.Tensor]) -> tuple[Later, Later | None]:
    """Return `digests` and `glances` of tensors; each small tensor is read once."""
    later = digests(tensors)
    if False in {t.is_cpu for t in tensors}:
        return later, None
    values = [
        digest if tensor.nbytes <= fingerprint.GLANCE_BYTES or _is_part(tensor) else fingerprint.glance(tensor)
        for tensor, digest in zip(tensors, later(), strict=True)
    ]
    return later, lambda: values


def numbers(scalars: Sequence[torch.Tensor]) -> LaterFloats:
    """Read zero-dimensional tensors, those of a device later; each must be a new result that nobody changes."""
    if not scalars:
        return list
    places = {s.device for s in scalars}
    if len(places) > 1:  # layers of one model on several devices
        split = [[i for i, s in enumerate(scalars) if s.device == place] for place in places]
        reads = [(positions, numbers([scalars[i] for i in positions])) for positions in split]

        def read_all() -> list[float]:
            found = {i: value for positions, read in reads for i, value in zip(positions, read(), strict=True)}
            return [found[i] for i in sorted(found)]

        return read_all
    if scalars[0].device.type == "cpu":
        # small tensors that outlive the step would keep the C library's heap from using again what lies around them
        values = [float(s) for s in scalars] if len(scalars) < _MANY else torch.stack(list(scalars)).tolist()
        return lambda: values
    by_dtype: dict[torch.dtype, list[int]] = {}  # a conversion of each one by itself would be a launch each
    for i, scalar in enumerate(scalars):
        by_dtype.setdefault(scalar.dtype, []).append(i)
    stacks = [torch.stack([scalars[i] for i in some]) for some in by_dtype.values()]
    stacked = stacks[0] if len(stacks) == 1 else torch.cat([stack.to(torch.float64) for stack in stacks])
    places_of = [i for some in by_dtype.values() for i in some]
    host, wait = _detached_copy(stacked)

    def read() -> list[float]:
        wait()
        found = [0.0] * len(places_of)
        for i, value in zip(places_of, host.tolist(), strict=True):
            found[i] = float(value)
        return found

    return read
