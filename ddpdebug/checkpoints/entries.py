"""The entries of a state: named tensors, each in one or several pieces that are read on demand, and other values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddpdebug.errors import UsageError
from ddpdebug.isolation.foreign import is_a
from ddpdebug.shard_digest import digest_number, shard_digest

Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangular part of a tensor."""

    offset: Place
    shape: Place
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a state, in pieces that do not overlap; of a live sharded tensor only this rank's pieces."""

    shape: Place
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """The size of all elements in bytes."""
        return self.count * self.dtype.itemsize

    @property
    def complete(self) -> bool:
        """Whether the pieces hold all elements."""
        return sum(math.prod(piece.shape) for piece in self.pieces) >= self.count

    def digest(self) -> int:
        """Return the sum of the pieces' digests, which is the tensor's digest if the pieces are complete."""
        return digest_number(sum(int(shard_digest(p.read(), p.offset, self.shape)) for p in self.pieces))

    def element(self, place: Place) -> Tensor:
        """Return one element of a complete tensor, as a tensor without dimensions."""
        for piece in self.pieces:
            inner = [i - first for i, first in zip(place, piece.offset, strict=True)]
            if all([0 <= i < n for i, n in zip(inner, piece.shape, strict=True)]):
                return piece.read()[tuple(inner)]
        raise IndexError(place)


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """An entry that is no tensor: a learning rate, a step, a name; bytes if it was not unpickled."""

    read: Callable[[], Any]


Entry = TensorEntry | ValueEntry


@dataclass(frozen=True, slots=True)
class State:
    """One side of a comparison."""

    where: str
    kind: str
    entries: Mapping[str, Entry] = field(repr=False)


def whole(tensor: Tensor) -> TensorEntry:
    """Return the entry of a tensor in memory, as one piece."""
    return TensorEntry(
        tuple(tensor.shape), tensor.dtype, (Piece((0,) * tensor.dim(), tuple(tensor.shape), lambda: tensor),)
    )


def flat(value: Any, where: str, entry_of: Callable[[Tensor], TensorEntry] = whole) -> dict[str, Entry]:
    """Return the entries of nested dicts, lists and tuples, under names with dots: `optimizer.state.0.exp_avg`.

    Raises:
        UsageError: two have the same name, as `{"a.b": 1, "a": {"b": 2}}`.
    """
    found: dict[str, Entry] = {}
    for name, leaf in _leaves(value, ""):
        if name in found:
            raise UsageError(f"{where!r} has two entries that are called {name!r}")
        found[name] = entry_of(leaf) if is_a(leaf, Tensor) else ValueEntry(_constant(leaf))
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    inner: Iterable[tuple[Any, Any]] | None = None
    if is_a(value, Mapping):
        inner = value.items()
    elif is_a(value, list | tuple):
        inner = enumerate(value)
    if inner is None:
        yield name, value
        return
    for key, item in inner:
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def overlaps(a: TensorEntry, b: TensorEntry) -> Iterator[tuple[Place, Tensor, Tensor]]:
    """Yield the overlaps of two entries of one shape: the position of the first element in the whole, and both tensors.

    One piece of each side is in memory at a time.
    """
    kept: tuple[Piece, Tensor] | None = None
    for piece in a.pieces:
        ours: Tensor | None = None
        for other in b.pieces:
            first = tuple(map(max, piece.offset, other.offset))
            size = [
                min(i + n, j + m) - k
                for i, n, j, m, k in zip(piece.offset, piece.shape, other.offset, other.shape, first, strict=True)
            ]
            if any([n <= 0 for n in size]):
                continue
            ours = piece.read() if ours is None else ours
            if kept is None or kept[0] is not other:
                kept = None  # before the next is read
                kept = (other, other.read())
            yield first, _cut(ours, piece, first, size), _cut(kept[1], other, first, size)


def _cut(tensor: Tensor, piece: Piece, first: Place, size: Sequence[int]) -> Tensor:
    for dim, (start, place, n) in enumerate(zip(piece.offset, first, size, strict=True)):
        tensor = tensor.narrow(dim, place - start, n)
    return tensor


def blocks(first: Place, a: Tensor, b: Tensor, most: int) -> Iterator[tuple[Place, Tensor, Tensor]]:
    """Yield parts of at most `most` elements of two equally shaped tensors, each with its first element's position."""
    if a.numel() <= most:
        yield first, a, b
        return
    dim = next(i for i, n in enumerate(a.shape) if n > 1)
    half = a.shape[dim] // 2
    yield from blocks(first, a.narrow(dim, 0, half), b.narrow(dim, 0, half), most)
    rest = a.shape[dim] - half
    moved = (*first[:dim], first[dim] + half, *first[dim + 1 :])
    yield from blocks(moved, a.narrow(dim, half, rest), b.narrow(dim, half, rest), most)
