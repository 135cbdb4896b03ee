"""The JSON form of messages between ranks. Torch-free.

What is sent and kept are frozen dataclasses, whose type hints say what their JSON looks like. What is read may come
from anywhere: reading never raises, keys that a class lacks are dropped, a value of a wrong type counts as missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

#: Numbers that JSON lacks; the files of a run directory hold them as texts.
_NONFINITE = frozenset({"nan", "inf", "-inf"})
_LEAVES: dict[Any, frozenset[type]] = {
    str: frozenset({str}),
    bool: frozenset({bool}),
    int: frozenset({int}),
    float: frozenset({float, int}),
    type(None): frozenset({type(None)}),
}


class Struct:
    """A frozen dataclass with a JSON form."""

    __slots__ = ()
    #: The JSON is that of the only field.
    bare: ClassVar[bool] = False
    #: The JSON is `{}` where every field has its default: nothing was seen.
    may_be_empty: ClassVar[bool] = False


S = TypeVar("S", bound=Struct)


#: What a field says of itself that is left out of the JSON where it is None.
ABSENT: Mapping[str, Any] = {"absent": ()}


def absent(*names: str) -> Mapping[str, Any]:
    """Return the metadata of a field that is left out of the JSON if each of the named fields is None."""
    return {"absent": names}


def called(key: str) -> Mapping[str, Any]:
    """Return the metadata of a field whose JSON key is no Python name."""
    return {"key": key}


def as_text(write: Callable[[Any], str], read: Callable[[str], Any]) -> Mapping[str, Any]:
    """Return the metadata of a field whose JSON is a text; `read` raises `ValueError` for a malformed one."""
    return {"write": write, "read": read}


def to_json(value: Any) -> Any:
    """Return the JSON value of a `Struct`, or of a container of some; other values stay the same."""
    if isinstance(value, Struct):
        if type(value).bare:
            return to_json(getattr(value, _fields(type(value))[0].name))
        return {key: to_json(item) for key, item in _mapping_of(value).items()}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


def from_json(kind: type[S], value: Any) -> S | None:
    """Return an instance from an untrusted JSON value; None if a field without a default is missing."""
    try:
        return _read(kind, value)
    except (_WrongError, RecursionError):
        return None


class _WrongError(Exception):
    """A value does not have the type that its place asks for."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    key: str
    read: Callable[[Any], Any]
    required: bool
    absent: tuple[str, ...]  # left out of the JSON where all of these are None
    write: Callable[[Any], Any] | None  # where its JSON is not that of its type


def _fields(kind: Any) -> tuple[_Field, ...]:
    return _fields_of(kind)


@cache
def _fields_of(kind: type[Any]) -> tuple[_Field, ...]:
    hints = get_type_hints(kind)
    made = []
    for f in dataclasses.fields(kind):
        required = f.default is f.default_factory is dataclasses.MISSING or get_origin(hints[f.name]) is Literal
        names = f.metadata.get("absent")
        left_out = () if names is None else names or (f.name,)
        read = _reader(hints[f.name]) if "read" not in f.metadata else _text_reader(f.metadata["read"])
        write = f.metadata.get("write")
        made.append(_Field(f.name, f.metadata.get("key", f.name), read, required, left_out, write))
    return tuple(made)


def _read(kind: type[S], value: Any) -> S:
    fields = _fields(kind)
    if kind.bare:
        return kind(**{fields[0].name: fields[0].read(value)})
    if not isinstance(value, dict):
        raise _WrongError
    known = {}
    for f in fields:
        try:
            known[f.name] = f.read(value[f.key])
        except (KeyError, _WrongError):
            if f.required:
                raise _WrongError from None
    return kind(**known)


def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return what reads a value of a type, or raises `_WrongError`."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is Literal:
        return lambda value: _checked(value, type(value) is type(args[0]) and value in args)
    if isinstance(hint, type):
        read: Callable[[Any, Any], Any] = _leaf if hint in _LEAVES else _read
        return lambda value: read(hint, value)
    readers = [_reader(arg) for arg in args if arg is not ...]
    if origin is tuple:
        return lambda value: _tuple(value, readers, any_length=args[-1] is ...)
    table = origin is Mapping
    return lambda value: _table(value, readers[1], args[1]) if table else _either(value, readers)


def _text_reader(read: Callable[[str], Any]) -> Callable[[Any], Any]:
    def reads(value: Any) -> Any:
        try:
            return read(_leaf(str, value))
        except ValueError:
            raise _WrongError from None

    return reads


def _checked(value: Any, fine: bool) -> Any:  # noqa: FBT001 - what was found of the value
    if not fine:
        raise _WrongError
    return value


def _leaf(kind: type, value: Any) -> Any:
    if kind is float and isinstance(value, str) and value in _NONFINITE:
        return float(value)
    return _checked(value, type(value) in _LEAVES[kind])


def _tuple(value: Any, readers: list[Callable[[Any], Any]], *, any_length: bool) -> tuple[Any, ...]:
    _checked(value, isinstance(value, list) and (any_length or len(value) == len(readers)))
    return tuple([(readers[0] if any_length else readers[i])(item) for i, item in enumerate(value)])


def _table(value: Any, read: Callable[[Any], Any], hint: Any) -> dict[str, Any]:
    table: dict[str, Any] = _checked(value, isinstance(value, dict))
    if {type(item) for item in table.values()} <= _LEAVES.get(hint, frozenset()):  # some have a key per parameter
        return table
    return {key: read(item) for key, item in table.items()}


def _either(value: Any, readers: list[Callable[[Any], Any]]) -> Any:
    for read in readers:
        try:
            return read(value)
        except _WrongError:
            continue
    raise _WrongError


def _mapping_of(value: Struct) -> Mapping[str, Any]:
    """Return the fields by their JSON keys, without those that are absent."""
    fields = _fields(type(value))
    if type(value).may_be_empty and value == type(value)():
        return {}
    left_out = (f for f in fields if f.absent and all(getattr(value, name) is None for name in f.absent))
    named = {f.key: f for f in fields}
    for f in left_out:
        del named[f.key]
    return {
        key: getattr(value, f.name) if f.write is None else f.write(getattr(value, f.name)) for key, f in named.items()
    }
