"""Runs a module's forward without leaving a trace on the module, its tensors or the random state.

The module gets stand-ins: leaves that share the memory of its parameters but have no hooks and gradients of their own,
and copies of its buffers. Everything that is the job's is put back afterwards, bit for bit, version counters included.
What a forward writes elsewhere (a global, a file, the inside of an object that the module holds) cannot be undone.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.probes.holding import is_container, items, rebuilt
from ddpdebug.probes.scene import RandomState

_BUFFER_BYTES = 64 << 20
_MAX_ITEMS, _ALL_ITEMS = 10_000, 100_000
_CONTAINERS = {list, dict, set, deque, OrderedDict, Counter, defaultdict}


class CopyOnWrite:
    """Saves memory of the job before it is written for the first time, and puts it back."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}

    def watch(self, tensor: torch.Tensor) -> None:
        """Remember the version counter of a tensor of the job."""
        version = internals.version_of(tensor)
        if version is not None:
            self._versions[id(tensor)] = (tensor, version)

    def before_write(self, tensor: torch.Tensor) -> None:
        """Save the memory behind a tensor, once."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._saved:
            self._saved[storage.data_ptr()] = (storage, storage.clone())

    def undo(self) -> None:
        """Put back what was written."""
        for storage, copy in self._saved.values():
            storage.copy_(copy)
        for tensor, version in self._versions.values():
            if internals.version_of(tensor) != version:
                internals.set_version(tensor, version)


class StandIns:
    """What the module works on during the replay, and what each part of it is called."""

    def __init__(self) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.hooks_left_out = 0
        self.protected = CopyOnWrite()


@contextlib.contextmanager
def undisturbed(
    module: torch.nn.Module, buffers: Mapping[str, torch.Tensor], modes: Mapping[str, bool]
) -> Iterator[StandIns]:
    """Prepare the module for one replay and put everything back afterwards.

    Args:
        buffers: values to start with, by name; the others start as they are now.
        modes: train/eval by name of the module.
    """
    stand_ins = StandIns()
    random_state = RandomState.now()
    with contextlib.ExitStack() as stack:
        stack.callback(random_state.restore)
        stack.callback(stand_ins.protected.undo)
        for part in dict.fromkeys(internals.modules(module)):
            stack.callback(_attributes(part))
        left_out = stack.enter_context(internals.without_global_hooks())
        _put_in(module, stand_ins, buffers)
        for name, part in internals.named_modules(module):
            part.training = modes.get(name, part.training)
            left_out += [hook for hook in internals.hooks_of(part) if not _is_computation(hook)]
            internals.keep_hooks(part, _is_computation)
        stand_ins.hooks_left_out = sum(not _module_of(hook).startswith("ddpdebug.") for hook in left_out)
        yield stand_ins


def _put_in(module: torch.nn.Module, stand_ins: StandIns, given: Mapping[str, torch.Tensor]) -> None:
    made: dict[int, torch.Tensor] = {}
    room = _BUFFER_BYTES
    for name, part in internals.named_modules(module, remove_duplicate=False):
        tables = internals.module_tables(part)
        prefix = f"{name}." if name else ""
        for key, parameter in tables[internals.PARAMETERS].items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                stand_ins.protected.watch(parameter)
                fresh = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                made[id(parameter)] = made[id(fresh)] = fresh
                stand_ins.parameters[prefix + key] = fresh
            tables[internals.PARAMETERS][key] = made[id(parameter)]
        for key, buffer in tables[internals.BUFFERS].items():
            if buffer is None:
                continue
            if id(buffer) not in made:
                stand_ins.protected.watch(buffer)
                value = given.get(prefix + key, buffer).detach()
                room -= value.nbytes
                # Statistics of a normalisation are always copied: their writing is not declared to the tracer.
                copied = room >= 0 or hasattr(part, "running_mean")
                fresh = value.clone() if copied else value
                made[id(buffer)] = made[id(fresh)] = fresh
                stand_ins.buffers[prefix + key] = fresh
            tables[internals.BUFFERS][key] = made[id(buffer)]


def _attributes(module: torch.nn.Module) -> Callable[[], None]:
    """Return what puts a module's attributes back: those that were set, and the items of its own lists and dicts."""
    tables = internals.module_tables(module)
    contents = [(table, table.copy()) for table in tables.values()]
    own = dict(module.__dict__)
    generators = [(g, g.get_state()) for g in own.values() if isinstance(g, torch.Generator)]
    contents += [(value, value.copy()) for value in _containers(own)]

    def put_back() -> None:
        _refill(module.__dict__, own)
        for container, items_before in contents:
            _refill(container, items_before)
        for generator, state in generators:
            generator.set_state(state)

    return put_back


def _containers(own: dict[str, Any]) -> list[Any]:
    """Return the containers among a module's attributes, and those inside them, as far as they are not large."""
    found: dict[int, Any] = {}
    waiting, room = deque(own.values()), _ALL_ITEMS
    while waiting:
        value = waiting.popleft()
        if type(value) in _CONTAINERS and id(value) not in found and len(value) < min(_MAX_ITEMS, room):
            room -= len(value)
            found[id(value)] = value
            waiting += value.values() if isinstance(value, dict) else value
    return list(found.values())


def _refill(container: Any, items_before: Any) -> None:
    if isinstance(container, deque):
        if [*map(id, container)] != [*map(id, items_before)]:
            container.clear()
            container.extend(items_before)
    elif isinstance(container, list):
        container[:] = items_before
    elif isinstance(container, set):
        container &= items_before
        container |= items_before
    else:  # never empty in between: another thread may look
        for key in [key for key in container if key not in items_before]:
            del container[key]
        dict.update(container, items_before)  # that of a `Counter` adds


def _is_computation(hook: object) -> bool:
    """Tell whether a hook is part of what the module computes (weight norm, pruning) and not the user's or ours."""
    return _module_of(hook).startswith("torch.nn.")


def _module_of(hook: object) -> str:
    inner = getattr(hook, "func", hook)
    return str(getattr(inner, "__module__", None) or type(inner).__module__)


def fresh_arguments(value: Any, protected: CopyOnWrite) -> Any:
    """Return arguments on the same memory without graphs or hooks; objects other than containers stay what they are."""
    if isinstance(value, torch.Tensor):
        protected.watch(value)
        return value.detach().requires_grad_(value.requires_grad)
    if is_container(value):
        return rebuilt(value, [fresh_arguments(item, protected) for _, item in items(value)])
    return value
