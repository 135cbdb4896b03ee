"""Lengths of data sets, samplers and loaders without a call of their `__len__`, which is user code.

Most `__len__` say no more than `len(self.rows)` or `self.size`: what such a one would return is read from its code and
the object's own attributes. Of another one the length is not known.
"""

from __future__ import annotations

import dis
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import attributes_of, is_a, is_one_of, is_sized, of_class

_MAX_DEPTH, _MAX_CODE = 6, 40
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
}
_PASSED = frozenset({"RESUME", "NOP", "PRECALL", "CACHE", "PUSH_NULL", "NOT_TAKEN"})
_LOADS = ("LOAD_FAST", "LOAD_FAST_BORROW")
_INDEXABLE = (list, tuple, dict, torch.Size)


class _UnknownError(Exception):
    """It cannot be said without running code."""


def length_of(value: Any, depth: int = 0) -> int | None:  # noqa: PLR0911 - one for each kind
    """Return the length of an object; None if only user code would know."""
    if is_sized(value):
        return len(value)
    if is_one_of(value, _TENSORS):
        return len(value) if value.dim() else None
    if depth > _MAX_DEPTH:
        return None
    own = attributes_of(value)
    method = of_class(type(value), "__len__")
    if method is vars(RandomSampler)["__len__"]:
        number = internals.number_of_samples(own)
        return length_of(own.get("data_source"), depth + 1) if number is None else number
    if method is vars(BatchSampler)["__len__"]:
        return _batches(length_of(own.get("sampler"), depth + 1), own.get("batch_size"), own.get("drop_last"))
    if type(method) is not FunctionType:
        return None
    try:
        found = _returned(method, value, depth)
    except (_UnknownError, IndexError, KeyError, ZeroDivisionError):
        return None
    return found if type(found) is int and found >= 0 else None


def batches_of(loader: DataLoader[Any]) -> int | None:
    """Return the number of a loader's batches; None for an iterable data set."""
    own = attributes_of(loader)
    if of_class(type(loader), "__len__") is not vars(DataLoader)["__len__"] or is_a(
        own.get("dataset"), IterableDataset
    ):
        return None
    batches = own.get("batch_sampler")
    return length_of(own.get("sampler") if batches is None else batches)


def _batches(samples: int | None, size: Any, drop_last: Any) -> int | None:
    if samples is None or type(size) is not int or size < 1:
        return None
    return samples // size if drop_last else -(-samples // size)


def _returned(method: FunctionType, value: Any, depth: int) -> Any:
    """Return what a method returns that only reads, counts and calculates.

    Raises:
        _UnknownError: it does something else.
    """
    code, stack = method.__code__, list[Any]()
    if code.co_argcount != 1 or len(code.co_code) > 2 * _MAX_CODE:
        raise _UnknownError
    for step in dis.get_instructions(code):
        if step.opname == "RETURN_VALUE":
            return stack.pop()
        if step.opname == "RETURN_CONST":
            return step.argval
        if step.opname in _LOADS and step.argval == code.co_varnames[0]:
            stack.append(value)
        elif step.opname not in _PASSED:
            stack.append(_evaluated(step, stack, method, depth))
    raise _UnknownError


def _evaluated(step: dis.Instruction, stack: list[Any], method: FunctionType, depth: int) -> Any:
    name = step.opname
    if name in {"LOAD_CONST", "LOAD_SMALL_INT"}:
        found = step.argval
    elif name == "LOAD_GLOBAL":
        found = _global(method, step.argval)
    elif name in {"LOAD_ATTR", "LOAD_METHOD"}:
        found = _attribute(stack.pop(), step.argval)
    elif name in {"BINARY_SUBSCR", "BINARY_OP"}:
        right, left = stack.pop(), stack.pop()
        by_key = name == "BINARY_SUBSCR" or step.argrepr == "[]"
        found = _item(left, right) if by_key else _calculated(step.argrepr, left, right)
    elif name == "CALL":
        arguments = [stack.pop() for _ in range(step.arg or 0)]
        found = _called(stack.pop(), arguments, depth)
    else:
        raise _UnknownError
    return found


def _global(method: FunctionType, name: str) -> Any:
    found = method.__globals__.get(name, len if name == "len" else None)
    if found is not len and type(found) is not int:
        raise _UnknownError
    return found


def _attribute(holder: Any, name: str) -> Any:
    if is_one_of(holder, _TENSORS) and name in {"shape", "size"}:
        return holder.shape if name == "shape" else _Sizes(holder.shape)
    if is_sized(holder) and name == "shape" and hasattr(holder, "shape"):
        return holder.shape
    on_class = of_class(type(holder), name)
    if of_class(type(holder), "__getattribute__") is not vars(object)["__getattribute__"]:
        raise _UnknownError
    if on_class is not None and (hasattr(type(on_class), "__set__") or name not in attributes_of(holder)):
        if type(on_class) is int:
            return on_class
        raise _UnknownError  # a property
    return attributes_of(holder)[name]


class _Sizes(tuple[int, ...]):
    """Stands for the method of a tensor that returns one of these."""

    __slots__ = ()


def _item(holder: Any, key: Any) -> Any:
    if not is_one_of(holder, _INDEXABLE) or not is_one_of(key, (int, str)):
        raise _UnknownError
    return holder[key]


def _calculated(sign: str, left: Any, right: Any) -> int:
    if sign not in _OPERATORS or type(left) is not int or type(right) is not int:
        raise _UnknownError
    return int(_OPERATORS[sign](left, right))


def _called(function: Any, arguments: list[Any], depth: int) -> int:
    if len(arguments) != 1:
        raise _UnknownError
    found = None
    if function is len:
        found = length_of(arguments[0], depth + 1)
    elif type(function) is _Sizes and type(arguments[0]) is int:
        found = function[arguments[0]]
    if found is None:
        raise _UnknownError
    return found
