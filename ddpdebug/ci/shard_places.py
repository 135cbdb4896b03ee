"""Finds which part of the single-process tensors a rank holds, if only the values show it.

A DTensor is put together by its placements. A plain parameter may be a part as well: a rank's own experts, a row of a
hand-written layer, a layer of a pipeline's stage under another number. At the start its values are some of those that
one process has, so they are looked for there: under its own name first, then anywhere. What is the same everywhere
(zeros and ones) goes where the rest of its module went.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """A block of a tensor of the single process."""

    name: str
    offset: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()

    def of(self, whole: Tensor) -> Tensor:
        """Return this block of a whole tensor."""
        return whole[tuple(slice(at, at + n) for at, n in zip(self.offset, self.shape, strict=True))]


def places_in(whole: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Place]:
    """Return, for each tensor of a rank, the block of the single-process tensors whose initial values are equal.

    Where nothing is equal to it, that is what has its name and shape; else the name is left out.
    """
    found: dict[str, Place] = {}
    open_: dict[str, list[Place]] = {}
    for name, tensor in own.items():
        by_name = [*_blocks(name, whole[name], tensor)] if name in whole else []
        equal = [place for place in by_name if torch.equal(place.of(whole[name]), tensor)]
        certain = bool(tensor.numel()) and not bool((tensor == tensor.flatten()[0]).all())
        if not equal or not certain:
            others = ((other, values) for other, values in whole.items() if other != name)
            equal += [
                place
                for other, values in others
                for place in _blocks(other, values, tensor)
                if torch.equal(place.of(values), tensor)
            ]
        if equal and (certain or len(equal) == 1):
            found[name] = equal[0]
        elif equal:
            open_[name] = equal
        elif by_name:
            found[name] = by_name[0]
    for name, candidates in open_.items():
        found[name] = _beside(name, candidates, found) or candidates[0]
    return found


def _beside(name: str, candidates: list[Place], found: Mapping[str, Place]) -> Place | None:
    """Return the candidate that lies in the module, and there at the offset, in which its neighbours lie."""
    path = name.split(".")
    for length in range(len(path) - 1, 0, -1):
        for other, place in found.items():
            theirs = other.split(".")
            if theirs[:length] != path[:length] or theirs[length:] != place.name.split(".")[len(theirs[:length]) :]:
                continue
            target = ".".join([*place.name.split(".")[:length], *path[length:]])
            fitting = [candidate for candidate in candidates if candidate.name == target]
            same = [candidate for candidate in fitting if candidate.offset[:1] == place.offset[:1]]
            if fitting:
                return (same or fitting)[0]
    return None


def _blocks(name: str, whole: Tensor, part: Tensor) -> Iterator[Place]:
    """Return the blocks of a tensor that have the shape of a part and divide it evenly."""
    if whole.dim() != part.dim() or any(not n or most % n for n, most in zip(part.shape, whole.shape, strict=True)):
        return
    ways = [range(0, most, n) for n, most in zip(part.shape, whole.shape, strict=True)]
    for offset in itertools.product(*ways):
        yield Place(name, offset, tuple(part.shape))


def is_block_of(part: Tensor, whole: Tensor, limit: float) -> bool | None:
    """Whether a tensor is, within a limit, a block of another or its rows reordered; None if shapes exclude it."""
    apart = [i for i, (n, most) in enumerate(zip(part.shape, whole.shape, strict=False)) if n != most]
    blocks = [*_blocks("", whole, part)]
    if not blocks:
        return None
    if any(float((place.of(whole) - part).abs().max()) <= limit for place in blocks if part.numel()):
        return True
    if not apart:
        return False
    last = apart[-1]
    for place in blocks:
        if place.offset[last]:
            continue
        shape = tuple(whole.shape[i] if i == last else n for i, n in enumerate(place.shape))
        rows = Place("", place.offset, shape).of(whole).movedim(last, 0).flatten(1)
        own = part.movedim(last, 0).flatten(1)
        if all(float((rows - row).abs().amax(1).min()) <= limit for row in own):
            return True
    return False
