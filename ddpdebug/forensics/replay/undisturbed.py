"""A copy of a module that runs in its place: nothing is written to the module, its tensors or anything process-wide.

The copy has the module's classes and attributes. Containers among the attributes, generators, and methods and functions
that know the module are copied with it; everything else is shared. It calls its own hooks only: torch's, which belong
to what a module computes (weight norm, pruning), and those that we give it. Hooks of the user stay where they are and
see nothing, in no thread; so do those that are registered for all modules.

The tensors of the copy are stand-ins with gradients, hooks and counters of in-place changes of their own. Small ones
have memory of their own as well, up to `COPY_BYTES` together. Larger ones lie on the memory of the job, which is never
written: an operation that is about to do so ends the run before it happens (see `tracer`), and the run begins again
with a copy of that memory if there is room for it.

What a forward writes elsewhere (a global, a file, the inside of an object that the module holds) is not undone.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.process_state import RandomState
from ddpdebug.isolation.user_code import is_users
from ddpdebug.nested import mapped, tensors_in
from ddpdebug.probes.holding import size_text, storage_of

#: Bytes that the stand-ins of one run may take; the activations of a step that takes so much are larger.
COPY_BYTES = 256 << 20
_MAX_ITEMS, _ALL_ITEMS = 10_000, 100_000
_CONTAINERS = {list, dict, set, deque, OrderedDict, Counter, defaultdict, tuple}
_NO_SLOTS = {"__dict__", "__weakref__"}


class CannotCopyError(Exception):
    """There is no copy of a module; the text is the reason."""


class Stopped(BaseException):  # a user's `except Exception` in forward must not swallow it
    """Ends a run from the inside; the text is the reason."""


class StandIns:
    """The copy of a module, and what it works on.

    Args:
        limit: bytes that copies of tensors may take.
        wanted: addresses of memory that has to be copied.
        alone: nothing but this run uses the process: what it writes elsewhere does no harm.
    """

    def __init__(self, limit: float = COPY_BYTES, wanted: Collection[int] = (), *, alone: bool = False) -> None:
        self.module: torch.nn.Module = torch.nn.Identity()  # until there is the copy
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.hooks_left_out = 0
        self.alone = alone
        self.room = limit
        self.originals: dict[int, str] = {}  # id of a parameter or buffer of the module -> name
        self.lent: dict[int, int] = {}  # memory of the job that stand-ins lie on: address -> bytes
        self._wanted, self._everything = wanted, False
        self._copies: dict[int, torch.UntypedStorage] = {}  # by the address of what was copied
        self._own: set[int] = set()  # addresses of these copies
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: the tensor, and what stands for it

    def copy_small(self, tensors: Collection[torch.Tensor]) -> None:
        """Give all stand-ins memory of their own if there is room for all these tensors."""
        self._everything = sum(dict(map(storage_of, tensors)).values()) <= self.room

    def may_write(self, address: int) -> bool:
        """Tell whether memory belongs to the stand-ins alone."""
        return address in self._own or (self.alone and address not in self.lent)

    def tensor(self, tensor: torch.Tensor, *, copied: bool = False) -> torch.Tensor:
        """Return the stand-in of a tensor of the job: without graph, a leaf that wants a gradient where this one does.

        Args:
            copied: on memory of its own, as far as there is room.
        """
        known = self._made.get(id(tensor))
        if known is not None:
            return known[1]
        fresh = self._on_memory(tensor, copied=copied)
        if isinstance(tensor, torch.nn.Parameter):
            fresh = torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad and tensor.is_leaf:
            fresh.requires_grad_()
        return self.put(tensor, fresh)

    def put(self, tensor: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        """Let `fresh` stand for a tensor of the job."""
        self._made[id(tensor)] = (tensor, fresh)
        self._made[id(fresh)] = (fresh, fresh)
        return fresh

    def argument(self, value: Any) -> Any:
        """Return an argument of the forward with stand-ins; objects other than containers stay what they are."""
        return mapped(value, lambda item: self._argument(item) if isinstance(item, torch.Tensor) else item)

    def _argument(self, tensor: torch.Tensor) -> torch.Tensor:
        known = id(tensor) in self._made
        fresh = self.tensor(tensor)
        return fresh if known else fresh.requires_grad_(tensor.requires_grad)

    def is_copied(self, tensor: torch.Tensor) -> bool:
        """Tell whether a stand-in lies on memory of its own."""
        return storage_of(tensor)[0] not in self.lent

    def _on_memory(self, tensor: torch.Tensor, *, copied: bool) -> torch.Tensor:
        address, size = storage_of(tensor)
        if not address or not internals.is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().clone() if copied else tensor.detach()
        storage = self._copies.get(address)
        if storage is None and (copied or self._everything or address in self._wanted) and size <= self.room:
            self.room -= size
            storage = self._copies[address] = tensor.untyped_storage().clone()
            self._own.add(storage.data_ptr())
        if storage is None:
            self.lent[address] = size
            return tensor.data  # unlike `detach()`, with a counter of in-place changes of its own
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return fresh.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


@contextlib.contextmanager
def undisturbed(
    module: torch.nn.Module,
    buffers: Mapping[str, torch.Tensor],
    modes: Mapping[str, bool],
    inputs: Any = (),
    stand_ins: StandIns | None = None,
) -> Iterator[StandIns]:
    """Copy a module for one run. Of what is process-wide, random state alone is touched, and put back.

    Args:
        buffers: values to start with, by name; the others start as they are now.
        modes: train/eval by name of the module.
        inputs: what the forward will be given, which takes room as well.

    Raises:
        CannotCopyError: there can be no copy.
    """
    stand_ins = stand_ins or StandIns()
    random_state = RandomState.now()
    copier = _Copier(stand_ins)
    try:
        stand_ins.copy_small([*_own_tensors(module), *tensors_in(inputs)])
        _put_in(module, stand_ins, buffers)
        stand_ins.module = copier.tree(module)
        for name, part in internals.named_modules(stand_ins.module):
            part.training = modes.get(name, part.training)
        left_out = [*copier.left_out, *internals.global_hooks()]
        stand_ins.hooks_left_out = sum(not _module_of(hook).startswith("ddpdebug.") for hook in left_out)
        yield stand_ins
    finally:
        random_state.restore()
        copier.forget()


def _own_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*internals.parameters(module), *internals.buffers(module)]


def _put_in(module: torch.nn.Module, stand_ins: StandIns, given: Mapping[str, torch.Tensor]) -> None:
    """Make the stand-ins of parameters and buffers, under their names."""
    for name, part in internals.named_modules(module, remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for key, buffer in internals.own_buffers(part).items():
            if id(buffer) in stand_ins.originals:
                continue
            stand_ins.originals[id(buffer)] = prefix + key
            if prefix + key in given:
                fresh = stand_ins.put(buffer, stand_ins.tensor(given[prefix + key].detach().clone()))
            else:
                fresh = stand_ins.tensor(buffer, copied=True)
            if hasattr(part, "running_mean") and not stand_ins.is_copied(fresh):  # writing it is not declared
                raise CannotCopyError(
                    f"there is no room for a copy of {prefix + key} ({size_text(fresh.nbytes)}), which forward writes"
                )
            stand_ins.buffers[prefix + key] = fresh
    for name, part in internals.named_modules(module, remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for key, parameter in internals.module_tables(part)[internals.PARAMETERS].items():
            if parameter is not None and id(parameter) not in stand_ins.originals:
                stand_ins.originals[id(parameter)] = prefix + key
                stand_ins.parameters[prefix + key] = stand_ins.tensor(parameter)


class _Copier:
    """Copies a module with what belongs to it."""

    def __init__(self, stand_ins: StandIns) -> None:
        self.left_out: list[Any] = []  # hooks
        self._stand_ins = stand_ins
        self._copies: dict[int, tuple[Any, Any]] = {}  # by id: the original, which must not die, and its copy
        self._modules: list[torch.nn.Module] = []
        self._room = _ALL_ITEMS
        self._by_kind: dict[type, Callable[[Any], Any]] = {
            **dict.fromkeys(_CONTAINERS, self._container),
            MethodType: self._method,
            FunctionType: self._function,
            functools.partial: self._partial,
            weakref.ref: self._reference,
            torch.Generator: self._generator,
        }

    def tree(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a copy of a module and of all below it."""
        parts = list(internals.named_modules(module))
        for name, part in parts:
            if reason := _reason_against(type(part)):
                raise CannotCopyError(f"{name or 'the model'} is a {type(part).__name__}, {reason}")
        for _, part in parts:  # all first, so that references from one to the other are found
            self._shell(part)
        for _, part in parts:
            self._fill(part)
        return self._module(module)

    def forget(self) -> None:
        """Empty the copies, which hold themselves and one another."""
        for module in self._modules:
            module.__dict__.clear()
        self._copies.clear()
        self._by_kind.clear()

    def _shell(self, module: torch.nn.Module) -> torch.nn.Module:
        try:
            copy: torch.nn.Module = object.__new__(type(module))
        except TypeError as error:
            if is_users(error):
                raise
            raise CannotCopyError(f"a {type(module).__name__} cannot be copied: {error}") from None
        self._copies[id(module)] = (module, copy)
        self._modules.append(copy)
        return copy

    def _fill(self, module: torch.nn.Module) -> None:
        copy = self._copies[id(module)][1]
        own = dict(module.__dict__)
        hooks = internals.hook_tables(module)
        self.left_out += [h for table in hooks.values() for h in table.values() if not _is_computation(h)]
        for name, table in hooks.items():
            own[name] = OrderedDict((key, hook) for key, hook in table.items() if _is_computation(hook))
        for name, value in own.items():
            if name in hooks:
                copy.__dict__[name] = value
            elif name in {internals.PARAMETERS, internals.BUFFERS, internals.MODULES}:
                copy.__dict__[name] = type(value)((key, self._value(item)) for key, item in value.items())
            else:
                copy.__dict__[name] = self._value(value)
        internals.call_own_hooks_only(copy)

    def _module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the copy of a module, also of one that is only reached through an attribute."""
        known = self._copies.get(id(module))
        if known is not None:
            copy: torch.nn.Module = known[1]
            return copy
        if isinstance(module, torch.jit.ScriptModule) or _reason_against(type(module)):
            return module
        copy = self._shell(module)
        if kind := internals.is_parallel(module):
            copy.__dict__.update(module.__dict__)
            internals.replace_call(copy, functools.partial(_refuse, kind))
        else:
            self._fill(module)
        return copy

    def _value(self, value: Any) -> Any:
        """Return what stands in the copy for a value that the module holds."""
        known, kind = self._copies.get(id(value)), type(value)
        if known is not None:
            return known[1]
        if issubclass(kind, torch.nn.Module):
            return self._module(value)
        if issubclass(kind, torch.Tensor):
            return self._stand_ins.tensor(value)
        made = self._by_kind.get(kind)
        if made is None:
            return self._holder(value) if self._knows_the_model(value) else value
        copy = made(value)
        self._copies[id(value)] = (value, copy)
        return copy

    def _method(self, value: MethodType) -> MethodType:
        return MethodType(self._value(value.__func__), self._value(value.__self__))

    def _partial(self, value: functools.partial[Any]) -> functools.partial[Any]:
        keywords = {key: self._value(item) for key, item in value.keywords.items()}
        return functools.partial(self._value(value.func), *map(self._value, value.args), **keywords)

    def _reference(self, value: weakref.ref[Any]) -> weakref.ref[Any]:
        known = self._copies.get(id(value()))
        return value if known is None else weakref.ref(known[1])

    @staticmethod
    def _generator(value: torch.Generator) -> torch.Generator:
        copy = torch.Generator(value.device)
        copy.set_state(value.get_state())
        return copy

    def _container(self, value: Any) -> Any:
        if len(value) >= min(_MAX_ITEMS, self._room):
            return value
        self._room -= len(value)
        if isinstance(value, tuple):
            copied = [self._value(item) for item in value]
            return tuple(copied) if any(new is not old for new, old in zip(copied, value, strict=True)) else value
        copy = value.copy()
        self._copies[id(value)] = (value, copy)  # before its items, one of which may be itself
        if isinstance(value, dict):
            for key, item in value.items():
                dict.__setitem__(copy, key, self._value(item))
        elif isinstance(value, set):
            copy.clear()
            copy.update(self._value(item) for item in value)
        else:
            for i, item in enumerate(value):
                copy[i] = self._value(item)
        return copy

    def _function(self, value: FunctionType) -> FunctionType:
        """Return a function with cells of its own, where what it has closed over is copied."""
        if not value.__closure__:
            return value
        cells = tuple(CellType() for _ in value.__closure__)
        copy = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        copy.__kwdefaults__, copy.__qualname__ = value.__kwdefaults__, value.__qualname__
        self._copies[id(value)] = (value, copy)
        changed = False
        for cell, old in zip(cells, value.__closure__, strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                content = old.cell_contents
                cell.cell_contents = self._value(content)
                changed = changed or cell.cell_contents is not content
        if not changed:
            return value
        copy.__dict__.update({key: self._value(item) for key, item in value.__dict__.items()})
        return copy

    def _knows_the_model(self, value: Any) -> bool:
        """Tell whether an object of the user's holds a module that is copied, or a method of one."""
        own = getattr(value, "__dict__", None)
        if type(own) is not dict or isinstance(value, type) or _reason_against(type(value)):
            return False
        held = (getattr(item, "__self__", item) if type(item) is MethodType else item for item in list(own.values()))
        return any(issubclass(type(item), torch.nn.Module) and id(item) in self._copies for item in held)

    def _holder(self, value: Any) -> Any:
        try:
            copy = object.__new__(type(value))
        except TypeError as error:  # of a class that C has made
            if is_users(error):
                raise
            return value
        self._copies[id(value)] = (value, copy)
        copy.__dict__.update({key: self._value(item) for key, item in dict(vars(value)).items()})
        return copy


def _reason_against(kind: type) -> str | None:
    """Return why an object of a class cannot be copied without running the user's code."""
    if hasattr(kind, "__del__"):
        return "a copy of which would run its __del__ a second time"
    own = [base for base in kind.__mro__ if base.__module__ != "builtins"]
    if any(set(_words(vars(base).get("__slots__", ()))) - _NO_SLOTS for base in own):
        return "which keeps attributes in slots"
    if issubclass(kind, torch.nn.Module) and not internals.calls_plainly(kind):
        return "which has a way of its own to be called"
    return None


def _words(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _refuse(kind: str, *_: Any, **__: Any) -> None:
    raise Stopped(f"it calls a {kind}, whose forward communicates")


def _is_computation(hook: object) -> bool:
    """Tell whether a hook is part of what the module computes (weight norm, pruning) and not the user's or ours."""
    return _module_of(hook).startswith("torch.nn.")


def _module_of(hook: object) -> str:
    inner = getattr(hook, "func", hook)
    return str(getattr(inner, "__module__", None) or type(inner).__module__)
