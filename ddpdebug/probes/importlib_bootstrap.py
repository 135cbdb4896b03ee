"""Wrappers for functions whose code cannot hold a callback. The name of this file is part of the mechanism.

Functions of torch have theirs in their own code (`torch_internals/function_code.py`); these are built-in ones, those of
somebody else, and any whose source is not at hand.

A warning with `stacklevel=2` belongs to the line that calls: so many frames up the stack. A wrapper is one frame more,
and the warning would be ours: another file, another line, another module for the filters. When Python counts, it leaves
out the frames of its import system, which it knows by a file name with `importlib` and `_bootstrap` in it
(`is_internal_frame` in `Python/_warnings.c`, `_is_internal_frame` in `warnings.py`). The frames of this file are left
out with them. See docs/decisions/008.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from ddpdebug.torch_internals import Around


def around(original: Callable[..., Any], look: Around) -> FunctionType:
    """Return a function that calls `original` once with the same arguments, and the callbacks before and after it.

    Under `torch.compile` it is the original.
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or look.idle:
            return original(*args, **kwargs)
        noted = look.begins(args, kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            look.failed(noted)
            raise
        return look.ended(noted, result)

    code, name = wrapper.__code__, getattr(original, "__name__", "wrapper")
    wrapper.__code__ = code.replace(co_name=name, co_qualname=getattr(original, "__qualname__", name))
    assert isinstance(wrapper, FunctionType)
    return wrapper


def after_that(first: Callable[[], Any], owner: type) -> Callable[..., None]:
    """Return a constructor that calls `first`, and then the constructor of `owner` as it is at that time."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        first()
        owner.__init__(self, *args, **kwargs)  # type: ignore[misc]

    return __init__
