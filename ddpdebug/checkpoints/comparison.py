"""Comparison of two states: names, shapes, dtypes, elements, and equal values under other names.

Elements are compared bit by bit. States are read tensor by tensor, those that differ more than once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ddpdebug.checkpoints.entries import Entry, Place, State, TensorEntry, ValueEntry, blocks, overlaps
from ddpdebug.checkpoints.names import pair
from ddpdebug.checkpoints.outcome import (
    DTYPE,
    ELEMENTS,
    KIND,
    ONLY_A,
    ONLY_B,
    SHAPE,
    VALUE,
    Difference,
    Side,
    StateComparison,
)
from ddpdebug.errors import UsageError
from ddpdebug.shard_digest import words_in

#: Elements that are looked at in detail at once: few, as new memory costs more than what is done in it.
_BLOCK = 1 << 15
#: To what the values of a dtype may have been rounded before they were stored in it.
_LOWER = {torch.float32: (torch.bfloat16, torch.float16), torch.float64: (torch.float32, torch.bfloat16, torch.float16)}


def compare(a: State, b: State) -> StateComparison:
    """Return the differences between two states.

    Raises:
        UsageError: one of them cannot be read to its end, or neither has an entry.
    """
    if not a.entries and not b.entries:
        raise UsageError(f"neither {a.where!r} nor {b.where!r} has an entry, so there is nothing to compare")
    of_tensors = [name for name, entry in a.entries.items() if isinstance(entry, TensorEntry)]
    pairing = pair(a.entries, b.entries, prefixes=not any([name in b.entries for name in of_tensors]))
    found: list[Difference] = []
    compared = floats = 0
    for name, other in pairing.pairs.items():
        x, y = a.entries[name], b.entries[other]
        if isinstance(x, TensorEntry) and isinstance(y, TensorEntry):
            number, difference = _tensors(name, x, y)
            compared += number
            floats += x.shape == y.shape and x.dtype.is_floating_point and y.dtype.is_floating_point
        else:
            difference = _values(name, x, y)
        if difference is not None:
            found.append(difference if name == other else replace(difference, name_b=other))
    found += [
        Difference(name=name, kind=ONLY_A, a=_text(a.entries[name]), bytes=_bytes(a.entries[name]))
        for name in pairing.only_a
    ]
    found += [
        Difference(name=name, kind=ONLY_B, b=_text(b.entries[name]), bytes=_bytes(b.entries[name]))
        for name in pairing.only_b
    ]
    searched = _Search(a, b, pairing.pairs)
    both = [*pairing.pairs, *pairing.pairs.values()]
    return StateComparison(
        a=_side(a),
        b=_side(b),
        left_out=pairing.left_out,
        entries=len(pairing.pairs),
        compared=compared,
        floats=floats,
        differences=tuple(sorted(map(searched.completed, found), key=lambda one: one.rank)),
        shared=frozenset(name.partition(".")[0] for name in both),
    )


def _side(state: State) -> Side:
    return Side(
        where=state.where, kind=state.kind, entries=len(state.entries), bytes=sum(map(_bytes, state.entries.values()))
    )


def _bytes(entry: Entry) -> int:
    return entry.size if isinstance(entry, TensorEntry) else 0


def _text(entry: Entry) -> str:
    return f"{_dtype(entry.dtype)} {list(entry.shape)}" if isinstance(entry, TensorEntry) else _short(entry.read())


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    if type(value) is bytes:
        return f"{len(value)} bytes that were not looked into"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of any class that was unpickled
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:79]}…"


def _values(name: str, x: Entry, y: Entry) -> Difference | None:
    if isinstance(x, ValueEntry) and isinstance(y, ValueEntry):
        a, b = x.read(), y.read()
        return None if _same(a, b) else Difference(name=name, kind=VALUE, a=_short(a), b=_short(b))
    return Difference(name=name, kind=KIND, a=_text(x), b=_text(y))


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
    except Exception:  # noqa: BLE001 - of any class that was unpickled
        return False


# -- tensors of one name


def _tensors(name: str, x: TensorEntry, y: TensorEntry) -> tuple[int, Difference | None]:
    """Return how many elements were compared, and what is different."""
    if x.shape != y.shape:
        return 0, Difference(name=name, kind=SHAPE, a=_text(x), b=_text(y), bytes=x.size)
    if x.dtype != y.dtype:
        difference = _details(name, x, y)
        return difference.elements or 0, difference
    number = 0
    for _, a, b in overlaps(x, y):
        number += a.numel()
        if not torch.equal(words_in(a), words_in(b.to(a.device))):
            difference = _details(name, x, y)
            return difference.elements or 0, difference
    return number, None


def _details(name: str, x: TensorEntry, y: TensorEntry) -> Difference:
    dtype = _common(x.dtype, y.dtype)
    sums = _Sums(x.shape, dtype)
    for first, a, b in overlaps(x, y):
        for place, part, other in blocks(first, a.detach(), b.detach(), _BLOCK):
            sums.add(place, part.to(dtype), other.to(part.device).to(dtype))
    found = Difference(
        name=name,
        kind=ELEMENTS if x.dtype == y.dtype else DTYPE,
        a=None if x.dtype == y.dtype else _dtype(x.dtype),
        b=None if x.dtype == y.dtype else _dtype(y.dtype),
        bytes=x.size,
        differing=sums.differing,
        elements=sums.elements,
    )
    if sums.first is None:
        return found
    _, index, a_there, b_there = sums.first
    return replace(
        found,
        index=index,
        values=(a_there, b_there),
        largest=sums.largest,
        nonfinite=sums.nonfinite,
        distance=sums.distance,
        rounded=next((side for side, so_far in sums.rounded.items() if so_far), None) if x.dtype == y.dtype else None,
    )


def _common(x: torch.dtype, y: torch.dtype) -> torch.dtype:
    """Return the dtype in which elements are compared: that of the narrower numbers, or one that holds both."""
    if x == y:
        return x
    if x.is_floating_point and y.is_floating_point and x.itemsize != y.itemsize:
        return min(x, y, key=lambda dtype: dtype.itemsize)
    return torch.complex128 if x.is_complex or y.is_complex else torch.float64


class _Sums:
    """What is added up over the parts of two tensors of one dtype."""

    def __init__(self, shape: Place, dtype: torch.dtype) -> None:
        self.shape = shape
        self.elements = self.differing = self.nonfinite = 0
        self.first: tuple[int, Place, float | str, float | str] | None = None
        self.largest: float | None = None
        self._squares = [0.0, 0.0, 0.0]  # of A, of B, of the difference
        #: By side and dtype: whether that side is the other, rounded to that dtype, as far as was seen.
        self.rounded = {(side, _dtype(lower)): True for lower in _LOWER.get(dtype, ()) for side in "AB"}

    def add(self, first: Place, a: Tensor, b: Tensor) -> None:
        """Add a part, of which the first element stands at `first`."""
        unequal = words_in(a) != words_in(b)
        while unequal.dim() > a.dim():
            unequal = unequal.any(-1)
        number = int(unequal.sum())
        self.elements += a.numel()
        self.differing += number
        if number:
            self._note_first(first, a, b, unequal)
        for (side, lower), so_far in self.rounded.items():
            own, other = (a, b) if side == "A" else (b, a)
            rounded = other.to(getattr(torch, lower)).to(a.dtype) if so_far else own
            self.rounded[side, lower] = so_far and torch.equal(words_in(rounded), words_in(own))
        x, y = _numbers(a), _numbers(b)
        if x is not None and y is not None:
            self._add_numbers(x, y, unequal)

    def _add_numbers(self, x: Tensor, y: Tensor, unequal: Tensor) -> None:
        apart = x - y
        squares = [_square(each) for each in (x, y, apart)]
        if not all(map(math.isfinite, squares)):
            finite = torch.isfinite(apart)
            self.nonfinite += int((unequal & ~finite).sum())
            x, y, apart = x[finite], y[finite], apart[finite]
            squares = [_square(each) for each in (x, y, apart)]
        self._squares = [a + b for a, b in zip(self._squares, squares, strict=True)]
        if bool(unequal.any()) and apart.numel():
            self.largest = max(self.largest or 0.0, float(apart.abs().max()))

    def _note_first(self, first: Place, a: Tensor, b: Tensor, unequal: Tensor) -> None:
        inner = _place(int(unequal.reshape(-1).to(torch.uint8).argmax()), a.shape)
        place = tuple(i + j for i, j in zip(first, inner, strict=True))
        number = 0
        for i, n in zip(place, self.shape, strict=True):
            number = number * n + i
        if self.first is None or number < self.first[0]:
            self.first = (number, place, _item(a[inner]), _item(b[inner]))

    @property
    def distance(self) -> float | None:
        """The norm of the difference in shares of the larger norm."""
        norm, apart = math.sqrt(max(self._squares[:2])), math.sqrt(self._squares[2])
        return apart / norm if norm > 0 and math.isfinite(norm) and math.isfinite(apart) else None


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) ** 2


def _place(number: int, shape: Sequence[int]) -> Place:
    found: list[int] = []
    for n in reversed(shape):
        number, place = divmod(number, n)
        found.append(place)
    return tuple(reversed(found))


def _numbers(tensor: Tensor) -> Tensor | None:
    try:
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    except RuntimeError:  # two numbers in a byte
        return None


def _item(element: Tensor) -> float | str:
    try:
        value = element.item()
    except RuntimeError:  # as above
        return "?"
    return value if isinstance(value, int | float) else str(value)


# -- the same values under another name


class _Search:
    """Finds the values that an entry lacks on the other side, by what entries contain."""

    def __init__(self, a: State, b: State, pairs: Mapping[str, str]) -> None:
        self._a, self._b = _Contents(a), _Contents(b)
        self._pairs = pairs
        self._paired = frozenset(pairs.values())

    def completed(self, one: Difference) -> Difference:
        """Return a difference with where its values are."""
        if one.kind == ONLY_A:
            tied = self._a.find(self._a, one.name, among=self._pairs)
            return replace(one, tied_to=tied, a_is=None if tied else self._b.find(self._a, one.name))
        if one.kind == ONLY_B:
            tied = self._b.find(self._b, one.name, among=self._paired)
            return replace(one, tied_to=tied, b_is=None if tied else self._a.find(self._b, one.name))
        if one.kind in {ELEMENTS, SHAPE}:
            other = self._pairs[one.name]
            return replace(one, a_is=self._b.find(self._a, one.name), b_is=self._a.find(self._b, other))
        return one


class _Contents:
    """The tensors of a state by what they contain. Digests are made of those only that look like another."""

    def __init__(self, state: State) -> None:
        self.entries = {
            name: entry
            for name, entry in state.entries.items()
            if isinstance(entry, TensorEntry) and entry.count > 1 and entry.complete
        }
        self._alike: dict[Any, list[str]] = defaultdict(list)
        for name, entry in self.entries.items():
            self._alike[entry.shape, entry.dtype].append(name)
        self._ends: dict[str, tuple[Any, ...]] = {}
        self._digests: dict[str, int] = {}

    def find(self, of: _Contents, name: str, among: Collection[str] | None = None) -> str | None:
        """Return the name of another entry here that has the values of an entry of `of`, unless those are all alike."""
        entry = of.entries.get(name)
        if entry is None:
            return None
        names = [n for n in self._alike.get((entry.shape, entry.dtype), ()) if self is not of or n != name]
        names = [n for n in names if (among is None or n in among) and self._end(n) == of._end(name)]
        names = [n for n in names if self._digest(n) == of._digest(name)]
        return None if not names or _is_constant(entry) else names[0]

    def _end(self, name: str) -> tuple[Any, ...]:
        """Return the bits of the first and the last element."""
        if name not in self._ends:
            entry = self.entries[name]
            places = ((0,) * len(entry.shape), tuple(n - 1 for n in entry.shape))
            self._ends[name] = tuple(words_in(entry.element(place)).tolist() for place in places)
        return self._ends[name]

    def _digest(self, name: str) -> int:
        if name not in self._digests:
            self._digests[name] = self.entries[name].digest()
        return self._digests[name]


def _is_constant(entry: TensorEntry) -> bool:
    first: Tensor | None = None
    for piece in entry.pieces:
        words = words_in(piece.read())
        first = words[(0,) * len(entry.shape)] if first is None else first
        if not bool((words == first).all()):
            return False
    return True
