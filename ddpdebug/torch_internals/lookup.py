"""Lookup of torch's private names: each is registered with its purpose and the probe that is off without it."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_MUST: Any = object()


class MissingError(RuntimeError):
    """This torch lacks a name that a part of ddpdebug needs; the part that meets the error is switched off."""


@dataclass(frozen=True)
class Feature:
    """A feature of ddpdebug that uses private names of torch.

    Args:
        name: for people, a few words.
        off: what is not there, or other than usual, where a name is missing.
    """

    name: str
    off: str


@dataclass(frozen=True)
class Name:
    """One private name of torch.

    Args:
        path: where it is, with its modules and class.
        off: which probe is off without it.
        found: whether this torch has it; asked anew each time.
        applies: false where this build of torch, or this process, cannot have it: no CUDA, a part that is not loaded.
        by_doctor: the probe loads or computes something, which only `ddpdebug doctor` and the tests do.
        since: the first torch that has it, where an earlier one is supported.
    """

    path: str
    feature: Feature
    off: str
    found: Callable[[], bool]
    applies: Callable[[], bool]
    by_doctor: bool
    since: tuple[int, int] = (0, 0)

    def is_missing(self) -> bool:
        """Whether this torch should have the name but has not."""
        return self.applies() and not self.found()

    def is_later(self) -> bool:
        """Whether this torch is known to be older than the name."""
        major, minor = torch.__version__.split(".")[:2]
        return (int(major), int(minor)) < self.since


#: Every private name of torch that ddpdebug uses.
TABLE: list[Name] = []


def resolve(path: str) -> Any:
    """Return the object at a path that begins with `torch.`; loads nothing.

    Raises:
        LookupError: nothing does.
    """
    parts = path.split(".")
    there = max(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in sys.modules)
    try:
        return functools.reduce(getattr, parts[there:], sys.modules[".".join(parts[:there])])
    except AttributeError as error:
        raise LookupError(f"this torch has no {path}") from error


def has(path: str) -> bool:
    """Whether there is an object at a path."""
    try:
        resolve(path)
    except LookupError:
        return False
    return True


def named_in(place: str, name: str) -> bool:
    """Whether the code of torch's function at `place` uses a name: a test for instance attributes.

    Where somebody has put a function of his own there, it is taken for granted.
    """
    try:
        code = getattr(inspect.unwrap(resolve(place)), "__code__", None)
    except LookupError:
        return False
    if code is None or code.co_name != place.rpartition(".")[2]:  # once it compiles, torch puts its own before some
        return True
    if not code.co_filename.startswith(str(Path(torch.__file__).parent)):
        return True
    return _names(code, name)


def _names(code: CodeType, name: str) -> bool:
    if name in code.co_names or any([isinstance(const, str) and const == name for const in code.co_consts]):
        return True
    return any([isinstance(const, CodeType) and _names(const, name) for const in code.co_consts])


def _always() -> bool:
    return True


def register(
    path: str,
    feature: Feature,
    *,
    off: str = "",
    found: Callable[[], bool] | None = None,
    applies: Callable[[], bool] = _always,
    by_doctor: bool = False,
    since: tuple[int, int] = (0, 0),
) -> Name:
    """Add a name to the table; without `found` it is looked up."""
    name = Name(path, feature, off or feature.off, found or functools.partial(has, path), applies, by_doctor, since)
    TABLE.append(name)
    return name


def thing(path: str, feature: Feature, *, otherwise: Any = _MUST, **more: Any) -> Any:
    """Register a function, class or module of torch and return it.

    Args:
        otherwise: returned where it is missing; by default something that raises `MissingError` when it is used.
    """
    name = register(path, feature, **more)
    try:
        return resolve(path)
    except LookupError:
        return _Missing(name) if otherwise is _MUST else otherwise


def later(path: str, feature: Feature, *, otherwise: Any = _MUST, **more: Any) -> Callable[[], Any]:
    """Register an object of torch that may be loaded later, or change; return a function that looks it up."""
    name = register(path, feature, **more)

    def look_up() -> Any:
        try:
            return resolve(path)
        except LookupError:
            return _Missing(name) if otherwise is _MUST else otherwise

    return look_up


def key(path: str, feature: Feature, *, stored_by: str = "", **more: Any) -> str:
    """Register an attribute of torch objects and return its bare name; a name that no object has if it is missing.

    Args:
        stored_by: the function that gives instances the attribute, or works with it, where it is no class's own.
    """
    bare = path.rpartition(".")[2]
    if stored_by:
        more["found"] = functools.partial(named_in, stored_by, bare)
    name = register(path, feature, **more)
    return bare if name.by_doctor or name.found() else f"{bare} (missing)"


def reader(path: str, feature: Feature, **more: Any) -> Callable[[Any], Any]:
    """Register an attribute as `key` does; return its getter."""
    bare = key(path, feature, **more)
    return _Missing(TABLE[-1]) if bare.endswith(" (missing)") else operator.attrgetter(bare)


class _Missing:
    """Stands for a name that is missing: says so where it is used, which switches the part off that does."""

    def __init__(self, name: Name) -> None:
        object.__setattr__(self, "_text", f"this torch has no {name.path}: {name.off}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise MissingError(object.__getattribute__(self, "_text"))

    def __getattr__(self, _: str) -> Any:
        raise MissingError(object.__getattribute__(self, "_text"))


def load(path: str) -> None:
    """Import the modules of a path as far as they exist; for the doctor."""
    parts = path.split(".")
    for n in range(2, len(parts)):
        try:
            importlib.import_module(".".join(parts[:n]))
        except ImportError:
            return
