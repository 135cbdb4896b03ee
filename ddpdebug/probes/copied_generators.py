"""Generators of random numbers that a loader's workers get as copies: each of them draws the same numbers.

Torch seeds its own generator, `random` and NumPy's in each worker, but not one that the data set holds. The code of the
methods that make items is read, and none of the user's is run.
"""

from __future__ import annotations

import dis
import random
import sys
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from ddpdebug.isolation.foreign import attributes_of, is_a, is_one_of, of_class
from ddpdebug.isolation.user_code import is_user_file, location

#: Methods that make an item, or transform one.
_MAKE = ("__getitem__", "__getitems__", "__iter__", "__call__", "forward")
#: What code that knows of workers, or sets the state for each item, mentions.
_SET = frozenset({"get_worker_info", "worker_info", "seed", "manual_seed", "setstate", "set_state", "spawn", "jumped"})
#: Objects of a data set that are looked at, and how deep they may lie.
_MOST, _DEEPEST = 128, 4


class CopiedGenerator(NamedTuple):
    """A generator, and the line of the user's code that draws from it."""

    name: str  # "Pairs.rng"
    location: str


def copied_generator(loader: DataLoader[Any]) -> CopiedGenerator | None:
    """Return a generator that workers draw from and that nothing makes another one in each of them."""
    own = attributes_of(loader)
    if own.get("worker_init_fn") is not None:
        return None
    kinds = _kinds()
    for thing in _things(own.get("dataset")):
        codes = _codes(type(thing))
        if any([not _SET.isdisjoint(code.co_names) for code in codes]):
            continue
        for name, value in attributes_of(thing).items():
            if is_one_of(value, kinds) and (line := _draws(codes, name)) is not None:
                return CopiedGenerator(f"{type(thing).__name__}.{name}", line)
    return None


def _kinds() -> list[type]:
    numpy = sys.modules.get("numpy.random")
    return [torch.Generator, random.Random, *([numpy.Generator, numpy.RandomState] if numpy is not None else [])]


def _things(dataset: Any) -> list[Any]:
    """Return a data set and what makes its items: other data sets, transforms, and lists of these."""
    found = newest = [dataset]
    for _ in range(_DEEPEST):
        inner = [value for thing in newest for value in _parts(thing) if _is_part(value)]
        known = {id(thing) for thing in found}
        newest = list({id(value): value for value in inner if id(value) not in known}.values())
        found = [*found, *newest][:_MOST]
    return found


def _parts(thing: Any) -> list[Any]:
    return list(thing if is_one_of(thing, (list, tuple)) else attributes_of(thing).values())[:_MOST]


def _is_part(value: Any) -> bool:
    if is_one_of(value, (list, tuple)):
        return 0 < len(value) <= _MOST and _is_part(value[0])
    return is_a(value, Dataset) or bool(_codes(type(value)))


def _codes(kind: type) -> list[CodeType]:
    """Return the code by which the user's class makes items, that of the methods which it calls included."""
    found: list[CodeType] = []
    names = list(_MAKE)
    for name in names:
        made = of_class(kind, name)
        if type(made) is FunctionType and is_user_file(made.__code__.co_filename) and made.__code__ not in found:
            codes = [made.__code__, *[c for c in made.__code__.co_consts if is_a(c, CodeType)]]
            found += codes
            names += [other for code in codes for other in code.co_names if other not in names]
    return found


def _draws(codes: list[CodeType], name: str) -> str | None:
    """Return the line that reads an attribute, unless some code sets it."""
    line: str | None = None
    for code in codes:
        if name not in code.co_names:
            continue
        at = code.co_firstlineno
        for step in dis.get_instructions(code):
            at = step.starts_line or at
            if step.argval == name and step.opname == "STORE_ATTR":
                return None
            if step.argval == name and step.opname in {"LOAD_ATTR", "LOAD_METHOD"} and line is None:
                line = location(code.co_filename, at)
    return line
