"""Holders of tensors that live from step to step: a variable, an attribute or a container, and the line that fills it.

Runs on the training thread between two steps, on suspicion only: the frames of another thread may change while they
are read. It goes from everything that has a name in the user's code (variables of the running functions, globals of
the user's modules) down through containers, attributes and closures, and counts what hangs there. Nothing of the
user's runs: no property, no `__len__`, no `__iter__` of a class. The work is bounded by counting objects, not by a
clock; of a container with many entries some are looked at, evenly spread.
"""

from __future__ import annotations

import dis
import gc
import inspect
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.local_variables import local_values
from ddpdebug.isolation.user_code import is_user_file, is_users, shorten
from ddpdebug.probes.graph_lifetime import marked_step
from ddpdebug.schema.details import Holder, Holders
from ddpdebug.torch_internals import graph

MAX_VISITS = 200_000
#: Nodes of autograd graphs that are followed, and entries of one container that are looked at.
_MAX_NODES = 50_000
_MAX_ENTRIES = 2_000
_MAX_DEPTH = 12
_MAX_HOLDERS = 3
_MAX_KEYS = 24  # a dictionary with more is one holder, with fewer each key is
_DICTS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, set, frozenset, deque)
#: Never followed: they lead everywhere, or nowhere.
_CLOSED = (
    ModuleType,
    type,
    CodeType,
    BuiltinFunctionType,
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    bool,
    torch.dtype,
)
_MUTATORS = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put", "push", "append_", "add_"}
)
_MAX_CODES = 2000


@dataclass(slots=True)
class _Place:
    """Something with a name; tensors found below it count for it, until something more precise is met."""

    name: str
    function: str | None
    codes: tuple[CodeType, ...]  # where to look for the line that fills it
    variable: str  # the last plain name in it
    line: str | None = None  # where it lives
    kind: str = ""
    entries: int | None = None
    collapsed: bool = False  # inside a container whose entries have no names of their own
    tensors: int = 0
    bytes: int = 0
    graphs: int = 0

    def below(self, name: str, variable: str, codes: tuple[CodeType, ...] = ()) -> _Place:
        """Return a more precise place."""
        return _Place(name, self.function, (*codes, *self.codes), variable, self.line)


@dataclass(slots=True)
class Search:
    """One search; `visits` and `nodes` count the objects examined.

    Args:
        known: ids of tensors that are meant to stay: parameters, gradients, optimizer state, buffers.
    """

    known: Collection[int]
    visits: int = 0
    places: list[_Place] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _nodes: set[Any] = field(default_factory=set)
    _keep: list[Any] = field(default_factory=list)  # what was made for the search: its numbers must not be used again

    def run(self, frames: Iterable[FrameType]) -> list[Holder]:
        """Return the holders, those that keep most first."""
        waiting: deque[tuple[Any, _Place, int]] = deque()
        for value, place in _roots(frames):
            waiting.append((value, place, 0))
        while waiting and self.visits < MAX_VISITS:
            value, place, depth = waiting.popleft()
            if id(value) in self._seen or issubclass(type(value), _CLOSED):
                continue
            self._seen.add(id(value))
            self._keep.append(value)
            self.visits += 1
            if issubclass(type(value), torch.Tensor):
                self._count(value, place)
            elif depth < _MAX_DEPTH:
                waiting.extend((inner, at, depth + 1) for inner, at in self._inside(value, place))
        found = [place for place in self.places if place.tensors]
        found.sort(key=lambda p: (-p.graphs, -p.bytes, p.name))
        return [_holder(place) for place in found[:_MAX_HOLDERS]]

    def _count(self, tensor: torch.Tensor, place: _Place) -> None:
        if id(tensor) in self.known:
            return
        if not place.tensors:
            place.kind = place.kind or type(tensor).__name__
            self.places.append(place)
        place.tensors += 1
        place.bytes += _bytes(tensor)
        if tensor.grad_fn is not None:
            place.graphs += self._passes(tensor.grad_fn)

    def _passes(self, root: Any) -> int:
        """Count the steps whose graphs hang on a node and on none before; without marks, the passes by one weight."""
        if len(self._nodes) >= _MAX_NODES:
            return 1
        steps: set[int] = set()
        uses: dict[Any, int] = {}
        waiting = [root]
        while waiting and len(self._nodes) < _MAX_NODES:
            node = waiting.pop()
            if node in self._nodes:
                continue
            self._nodes.add(node)
            step = marked_step(node)
            if step is not None:
                steps.add(step)
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if graph.is_leaf(following):  # the node of a parameter: used once in each pass, or a few times
                    uses[following] = uses.get(following, 0) + 1
                else:
                    waiting.append(following)
        return max(len(steps), min(uses.values(), default=0))

    def _inside(self, value: Any, place: _Place) -> Iterator[tuple[Any, _Place]]:
        """Yield what is directly in a value, with its place."""
        kind = type(value)
        if kind in _DICTS:
            yield from self._entries(value, place)
        elif kind in _SEQUENCES or (issubclass(kind, tuple) and kind.__len__ is tuple.__len__):
            yield from ((item, _container(value, place)) for item in _some(value, len(value)))
        elif kind is FunctionType:
            if is_user_file(value.__code__.co_filename):
                yield from _closure(value, place)
        elif kind is MethodType:
            yield value.__self__, place
            yield value.__func__, place
        elif issubclass(kind, FrameType | GeneratorType):
            yield from _frame_items(value if issubclass(kind, FrameType) else value.gi_frame)
        elif issubclass(kind, BaseException):
            yield from _traceback(value, place)
        else:
            yield from _attributes(value, place)

    def _entries(self, value: dict[Any, Any], place: _Place) -> Iterator[tuple[Any, _Place]]:
        named = len(value) <= _MAX_KEYS and all(type(key) is str for key in value) and not place.collapsed
        shared = _container(value, place)
        for key in _some(value, len(value)):
            item = dict.get(value, key)
            yield item, place.below(f"{place.name}[{key!r}]", place.variable) if named else shared
            if not named:
                yield key, shared


def search(known: Collection[int], frame: FrameType | None) -> Holders:
    """Look for holders, from the variables of a running frame and its callers outwards."""
    frames = []
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    found = Search(known)
    holders = found.run(frames)
    return Holders(holders=tuple(holders), visits=found.visits)


# --- where to begin ---------------------------------------------------------------------------------------------------


def _roots(frames: Iterable[FrameType]) -> Iterator[tuple[Any, _Place]]:
    scopes: set[int] = set()
    for frame in frames:
        scopes.add(id(frame.f_globals))
        yield from _frame_items(frame)
    modules = [m for m in list(sys.modules.values()) if type(m) is ModuleType]
    for module in modules:
        file = vars(module).get("__file__")
        if isinstance(file, str) and is_user_file(file):
            codes = tuple([f.__code__ for f in vars(module).values() if type(f) is FunctionType])
            for name, value in list(vars(module).items()):
                if not name.startswith("__"):
                    yield value, _Place(name, None, codes, name, shorten(file))


def _frame_items(frame: FrameType | None) -> Iterator[tuple[Any, _Place]]:
    if frame is None or not is_user_file(frame.f_code.co_filename):
        return
    code = frame.f_code
    top = code.co_name == "<module>"
    others = tuple([f.__code__ for f in list(frame.f_globals.values()) if type(f) is FunctionType])
    line = f"{shorten(code.co_filename)}:{frame.f_lineno}"
    variables = local_values(frame) if code.co_flags & inspect.CO_OPTIMIZED else frame.f_locals
    for name, value in list(variables.items()) if type(variables) is dict else ():  # a metaclass may give another one
        if not name.startswith("__"):
            yield value, _Place(name, None if top else code.co_name, (code, *others), name, line)


# --- how to go on -----------------------------------------------------------------------------------------------------


def _container(value: Any, place: _Place) -> _Place:
    """Return the place of a container's entries: the container, unless it lies in another one."""
    if not place.collapsed:
        place.kind, place.entries, place.collapsed = type(value).__name__, len(value), True
    return place


def _some(entries: Any, count: int) -> Iterable[Any]:
    """Return a container's entries, of many only some: evenly spread, the last ones among them."""
    step = -(-count // _MAX_ENTRIES) if count else 1
    try:
        return list(islice(entries, (count - 1) % step if count else 0, None, step))
    except RuntimeError as error:  # another thread changes it
        if is_users(error):
            raise
        return []


def _closure(function: FunctionType, place: _Place) -> Iterator[tuple[Any, _Place]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            content = cell.cell_contents
        except ValueError as error:  # not assigned yet
            if is_users(error):
                raise
            continue
        line = f"{shorten(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"
        yield content, _Place(name, function.__qualname__, (function.__code__, *place.codes), name, line)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield value, place


def _traceback(error: BaseException, place: _Place) -> Iterator[tuple[Any, _Place]]:
    """Yield the variables of the functions that an exception has left: its traceback keeps them."""
    if " (traceback" not in place.name:
        name = f"{place.name} (tracebacks)" if place.collapsed else f"{place.name} (traceback)"
        if place.collapsed:
            place.name = name
        else:
            place = place.below(name, place.variable)
    trace = error.__traceback__
    for _ in range(_MAX_DEPTH):
        if trace is None:
            return
        if trace.tb_frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # the others' variables are globals
            yield from ((value, place) for value, _ in _frame_items(trace.tb_frame))
        trace = trace.tb_next


def _attributes(value: Any, place: _Place) -> Iterator[tuple[Any, _Place]]:
    kind = type(value)
    methods = tuple(
        [
            function.__code__
            for base in kind.__mro__
            for function in vars(base).values()
            if type(function) is FunctionType and is_user_file(function.__code__.co_filename)
        ]
    )
    own = inspect.getattr_static(value, "__dict__", None)
    table = object.__getattribute__(value, "__dict__") if own is not None else None
    if type(table) is not dict:
        table = {}
    listed: set[int] = set()
    for name, item in list(table.items()):
        listed.add(id(item))
        plain = str(name)
        if place.collapsed:
            yield item, place
        elif plain in {internals.MODULES, internals.PARAMETERS, internals.BUFFERS} and type(item) is dict:
            for inner, child in list(item.items()):
                yield child, place.below(f"{place.name}.{inner}", str(inner), methods)
        else:
            yield item, place.below(f"{place.name}.{plain}", plain, methods)
    for item in gc.get_referents(value):  # slots, and what types written in C hold
        if id(item) not in listed and item is not table and type(item) is not CellType:
            yield item, place


def _holder(place: _Place) -> Holder:
    return Holder(
        name=place.name,
        kind=place.kind,
        entries=place.entries,
        function=place.function,
        location=filled_at(place.codes, place.variable) or place.line,
        graphs=place.graphs,
        tensors=place.tensors,
        bytes=place.bytes,
    )


def _bytes(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.nbytes)
    except (RuntimeError, NotImplementedError) as error:  # sparse, or without storage
        if is_users(error):
            raise
        return 0


@dataclass(slots=True)
class _Line:
    loads: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)
    into_item: bool = False

    def score(self, name: str) -> int:
        """Return how likely the line makes `name` grow: 3 adds to it, 2 sets it from itself, 1 sets it, 0 neither."""
        if name in self.loads and (self.into_item or self.loads & _MUTATORS):
            return 3
        if name in self.stores:
            return 2 if name in self.loads else 1
        return 0


def filled_at(codes: Iterable[CodeType], name: str) -> str | None:
    """Return the `file:line` that most likely adds to `name`; earlier code objects win a tie."""
    best: tuple[int, str] | None = None
    for code in _with_nested(codes):
        for number, line in sorted(_lines(code).items()):
            score = line.score(name)
            if score and (best is None or score > best[0]):
                best = score, f"{shorten(code.co_filename)}:{number}"
    return None if best is None else best[1]


def _with_nested(codes: Iterable[CodeType]) -> Iterator[CodeType]:
    waiting, seen = list(codes), set[int]()
    while waiting and len(seen) < _MAX_CODES:
        code = waiting.pop(0)
        if id(code) in seen or not is_user_file(code.co_filename):
            continue
        seen.add(id(code))
        yield code
        waiting += [part for part in code.co_consts if isinstance(part, CodeType)]


def _lines(code: CodeType) -> dict[int, _Line]:
    lines: dict[int, _Line] = {}
    number = code.co_firstlineno
    starts = {offset: line for offset, line in dis.findlinestarts(code) if line is not None}
    for instruction in dis.get_instructions(code):
        number = starts.get(instruction.offset, number)
        line = lines.setdefault(number, _Line())
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        found = {name for name in names if isinstance(name, str)}
        if instruction.opname.startswith("LOAD_") and instruction.opname != "LOAD_CONST":
            line.loads |= found
        elif instruction.opname.startswith(("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR")):
            line.stores |= found
        elif instruction.opname in {"STORE_SUBSCR", "LIST_APPEND"}:
            line.into_item = line.into_item or instruction.opname == "STORE_SUBSCR"
    return lines
