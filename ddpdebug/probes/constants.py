"""Constants of a model besides parameters and buffers: precision, and tensors and numbers in plain attributes.

Precision and tensors are told once; of numbers those that change while the model trains.
"""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import bases_of, is_one_of
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes import async_copy as device
from ddpdebug.probes.values import precision
from ddpdebug.schema.announcements import NUMBER, Constants, NumberChange, Numbers, Precision

#: Training forwards that an attribute must have survived unchanged to be a constant and no cache or result.
_FORWARDS = 4
_MAX_TENSORS = 64
#: Another class of tensor may run code of its own for whatever it is asked.
_KINDS = (torch.Tensor, torch.nn.Parameter)
_MAX_BYTES = 4 << 20
#: A longer list or dict is a vocabulary or a data set, which is not gone through.
_MAX_ITEMS = 1000
#: Numbers that are followed: reading one takes 0.05 microseconds, in every training forward.
_MAX_NUMBERS = 256
#: Training forwards between two announcements about numbers: at first, and at most.
_FIRST_TOLD, _SELDOM_TOLD = 8, 256


class Settings:
    """The constants of one DDP's module, as they were at wrapping."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._forwards = 0
        self._numbers: _Numbers | None = None
        found = _plain_tensors(module)
        digests = device.digests([t for _, t in found])() if found else []
        #: name, the tensor, its version, what the ranks compare
        self._plain = [
            (name, internals.Seen(t), internals.version_of(t), f"{tuple(t.shape)}:{digest:016x}")
            for (name, t), digest in zip(found, digests, strict=True)
        ]

    def at_forward(self, module: torch.nn.Module, step: int = 0) -> Sequence[Precision | Constants | Numbers]:
        """Return the announcements that are due at this training forward, which belongs to an optimizer step."""
        self._forwards += 1
        if self._forwards == 1:
            self._numbers = _Numbers(module)
            return (replace(precision(module), location=user_location()),)
        assert self._numbers is not None
        self._numbers.look(step)
        if self._forwards == _FORWARDS + 1:
            return (Constants(tensors={**self._unchanged(module), **self._numbers.constants}),)
        every = min(_SELDOM_TOLD, max(_FIRST_TOLD, (1 << self._forwards.bit_length()) >> 3))
        return (Numbers(changes=self._numbers.take()),) if self._forwards % every == 0 and self._numbers else ()

    def _unchanged(self, module: torch.nn.Module) -> dict[str, str]:
        now = dict(_plain_tensors(module))
        found = {
            name: shown
            for name, seen, version, shown in self._plain
            if name in now
            and version is not None
            and seen.is_of(now[name])
            and internals.version_of(now[name]) == version
        }
        read = _names_read(module) if found else None
        return found if read is None else {name: shown for name, shown in found.items() if _attribute(name) in read}


class _Numbers:
    """The numbers in plain attributes that the code of a forward reads and never writes; all ranks follow the same."""

    def __init__(self, module: torch.nn.Module) -> None:
        code = _code_of(module)
        read = None if code & _COMPUTED else code
        stored = {name.removeprefix("=") for name in code if name.startswith("=")}
        #: Path -> value of rates, which a configuration sets; whole numbers may be a rank's own.
        self.constants: dict[str, str] = {}
        #: path, module, name, the value of the class
        self._places: list[tuple[str, weakref.ref[torch.nn.Module], str, Any]] = []
        for path, part in internals.named_modules(module):
            by_torch = _is_torchs(type(part).forward)  # whose code is not read: a rate, an epsilon, a slope
            kinds = [vars(kind) for kind in reversed(bases_of(type(part))) if not _is_torchs(kind)]
            usual = {name: value for own in kinds for name, value in own.items() if is_one_of(value, _NUMBERS)}
            for name, value in {**usual, **vars(part)}.items():
                if not is_one_of(value, _NUMBERS) or name.startswith("_") or name == "training" or name in stored:
                    continue
                if by_torch or read is None or name in read:
                    whole = f"{path}.{name}" if path else name
                    self._places.append((whole, weakref.ref(part), name, usual.get(name)))
                    if len(self.constants) < _MAX_NUMBERS and type(value) is float:
                        self.constants[whole] = f"{NUMBER}{value}"
        if "setattr" in code:
            self._places.clear()  # nobody knows what the forward itself writes
            self.constants.clear()
        del self._places[_MAX_NUMBERS:]
        self._values = self._read()
        self._changes: dict[str, NumberChange] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def _read(self) -> list[Any]:
        return [None if (m := ref()) is None else vars(m).get(name, usual) for _, ref, name, usual in self._places]

    def look(self, step: int) -> None:
        """Note which numbers are others than before the forward that was looked at last."""
        values, before = self._read(), self._values
        if values == before:
            return
        self._values = values
        for (path, *_), old, new in zip(self._places, before, values, strict=True):
            if old == new or type(old) not in _NUMBERS or type(new) not in _NUMBERS:
                continue
            known = self._changes.get(path) or NumberChange(was=old, value=new, step=step, times=0)
            self.constants.pop(path, None)
            self._changes[path] = replace(known, value=new, times=known.times + 1)

    def take(self) -> Mapping[str, NumberChange]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, {}
        return changes


def _attribute(path: str) -> str:
    """Return the attribute's own name: `blocks.0.tables[2]` is in `tables`."""
    return path.partition("[")[0].rpartition(".")[2]


def _names_read(module: torch.nn.Module) -> set[str] | None:
    """Return all names that occur in the code of the module's forward, and in what it calls of its classes and files.

    A tensor that only an evaluation uses may differ between ranks: its name is not among them. None where the code
    reads attributes by names that it computes. What is called through an object of another kind is not followed.
    """
    names = {name for name in _code_of(module) if not name.startswith("=")}
    return None if names & _COMPUTED else names


def _code_of(module: torch.nn.Module) -> set[str]:
    """Return the names that `_names_read` tells of, and with "=" in front those of attributes that are written."""
    names: set[str] = set()
    parts = list(internals.modules(module))
    bases = {id(base): base for part in parts for base in bases_of(type(part))}
    kinds = [base for base in bases.values() if not _is_torchs(base)]
    waiting: list[Any] = [part.forward for part in parts]
    functions: set[FunctionType] = set()  # one code may be that of several, as decorators have it
    seen: set[CodeType] = set()
    while waiting:
        function = _unwrapped(waiting.pop())
        if type(function) is not FunctionType or function in functions or _is_torchs(function):
            continue
        functions.add(function)
        codes = [function.__code__]
        waiting += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        while codes:
            code = codes.pop()
            if code in seen:
                continue
            seen.add(code)
            codes += [value for value in code.co_consts if isinstance(value, CodeType)]
            names.update(code.co_names)
            names.update(f"={op.argval}" for op in dis.get_instructions(code) if op.opname == "STORE_ATTR")
            waiting += [function.__globals__.get(name) for name in code.co_names]
            waiting += [vars(kind)[name] for kind in kinds for name in code.co_names if name in vars(kind)]
            # every forward of the classes: `super()` leads to one by a name that is no longer looked up here
            waiting += [vars(kind)["forward"] for kind in kinds if "super" in code.co_names and "forward" in vars(kind)]
    return names


_NUMBERS = (float, int, bool)
_COMPUTED = {"getattr", "__dict__", "vars", "attrgetter", "import_module"}


def _unwrapped(value: Any) -> Any:
    """Return the function inside of what stands for one: methods, properties, partial objects, decorators."""
    for _ in range(8):
        kind = type(value)  # what the code names may be any object of the user's: nothing of it may run
        if issubclass(kind, MethodType | staticmethod | classmethod):
            value = value.__func__
        elif issubclass(kind, property):
            value = value.fget
        elif issubclass(kind, functools.cached_property | functools.partial):
            value = value.func
        elif (
            kind is not FunctionType
            and type(inner := inspect.getattr_static(value, "__wrapped__", None)) is FunctionType
        ):
            value = inner
        else:
            break
    return value


def _is_torchs(thing: Any) -> bool:
    return str(getattr(thing, "__module__", None) or "").partition(".")[0] == "torch"


def _is_filled(cell: Any) -> bool:
    try:
        return type(cell.cell_contents) in {FunctionType, MethodType}
    except ValueError:
        return False


def _plain_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the floating-point tensors in attributes that are neither parameters nor buffers, lists and dicts too."""
    found: list[tuple[str, torch.Tensor]] = []
    for path, part in internals.named_modules(module):
        own = {id(t) for t in (*internals.own_parameters(part), *internals.own_buffers(part).values())}
        for name, value in list(vars(part).items()):
            if name.startswith("_"):
                continue
            for place, tensor in _tensors(value):
                if id(tensor) not in own and _is_constant_like(tensor):
                    found.append((f"{path}.{name}{place}" if path else f"{name}{place}", tensor))
    return found[:_MAX_TENSORS]


def _tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if is_one_of(value, _KINDS):
        yield "", value
    elif is_one_of(value, (list, tuple)) and len(value) <= _MAX_ITEMS:
        yield from ((f"[{i}]", item) for i, item in enumerate(value) if is_one_of(item, _KINDS))
    elif type(value) is dict and len(value) <= _MAX_ITEMS:
        # other keys look different on each rank
        named = ((key, item) for key, item in list(value.items()) if is_one_of(key, (str, int)))
        yield from ((f"[{key!r}]", item) for key, item in named if is_one_of(item, _KINDS))


def _is_constant_like(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be compared: of some size, with values, and no result that hangs on a graph."""
    plain = tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.grad_fn is None
    return plain and tensor.is_floating_point() and tensor.numel() > 1 and tensor.nbytes <= _MAX_BYTES
