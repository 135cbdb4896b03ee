"""The local variables of running functions, read without side effects: no dictionary is made or changed.

Before Python 3.13 `frame.f_locals` makes a dictionary that the frame keeps, and brings it up to date whenever anybody
asks again. Whoever was given it (a helper that notes its caller's arguments, a debugger) would see what we do to it;
left alone it would keep a batch and its graph alive. So the variables are read where the interpreter has them: by
`PyFrame_GetVar` of Python 3.12, and in Python 3.11, which has no such function and gets no other layout any more, from
the frame itself.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FrameType
from typing import Any

_Read = Callable[[FrameType, CodeType], Iterator[tuple[str, Any]]]

# Python 3.11, in words of memory: struct _frame, and struct _PyInterpreterFrame to which its second field leads.
_WORD = ctypes.sizeof(ctypes.c_void_p)
_HEAD, _DATA = 6 * _WORD, 3 * _WORD
_CODE, _OBJECT, _VALUES = 4 * _WORD, 5 * _WORD, 9 * _WORD
# Memory is read through pointers: `from_address` would call the script's audit hooks, which may refuse it.
_WORDS, _OBJECTS = ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.py_object)


def local_values(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a function's frame in this thread; empty for a module or class body."""
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return {}
    return dict(_READ(frame, code))


def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names of all variables in the order of their places: an argument that is a cell has one place."""
    cells = (name for name in code.co_cellvars if name not in code.co_varnames)
    return (*code.co_varnames, *cells, *code.co_freevars)


def _reader() -> _Read:
    if sys.version_info >= (3, 13):
        return lambda frame, _: iter(frame.f_locals.items())  # a view, made anew for each who asks
    if sys.version_info >= (3, 12):
        return _asked()
    return _from_memory if _is_known_layout() else _nothing


def _nothing(_frame: FrameType, _code: CodeType) -> Iterator[tuple[str, Any]]:
    return iter(())


def _asked() -> _Read:
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object)
    value_of = prototype(("PyFrame_GetVar", ctypes.pythonapi))

    def read(frame: FrameType, code: CodeType) -> Iterator[tuple[str, Any]]:
        for name in _names(code):
            try:
                value = value_of(frame, name)
            except NameError:  # it has no value now
                continue
            yield name, value

    return read


def _from_memory(frame: FrameType, code: CodeType) -> Iterator[tuple[str, Any]]:
    data = _word(id(frame) + _DATA)
    for place, name in enumerate(_names(code)):
        address = data + _VALUES + place * _WORD
        if not _word(address):
            continue
        value: Any = ctypes.cast(address, _OBJECTS)[0]
        if type(value) is CellType and (name in code.co_cellvars or name in code.co_freevars):
            try:
                value = value.cell_contents
            except ValueError:  # it has no value now
                continue
        yield name, value


def _word(address: int) -> int:
    return int(ctypes.cast(address, _WORDS)[0])


def _is_known_layout() -> bool:
    """Return whether frames of this interpreter are laid out as those of CPython 3.11."""
    if sys.implementation.name != "cpython" or FrameType.__basicsize__ != _HEAD + _VALUES or hasattr(sys, "getobjects"):
        return False
    frame = sys._getframe()  # noqa: SLF001 - any would do
    data = _word(id(frame) + _DATA)
    found = [_word(data + place) for place in (_CODE, _OBJECT)] if data else []
    return found == [id(frame.f_code), id(frame)]


_READ = _reader()
