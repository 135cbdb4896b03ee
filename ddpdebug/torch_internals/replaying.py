"""Adapter for replays: torch's hooks, tables of modules, autograd nodes, versions, dispatch."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ddpdebug.torch_internals import names
from ddpdebug.torch_internals.names import inherits
from ddpdebug.torch_internals.unlisted import unlisted

#: The tables of a module in which its tensors are.
_TABLES = (names.PARAMETERS, names.BUFFERS)


def clones(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return detached copies of tensors, made by one launch for all of them."""
    if not tensors:
        return []
    return [unlisted(copy) for copy in names.foreach_clone([tensor.detach() for tensor in tensors])]


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own table of buffers."""
    return _table(module, names.BUFFERS)


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return a module's own table of parameters."""
    return _table(module, names.PARAMETERS)


def _table(module: torch.nn.Module, name: str) -> dict[str, Any]:
    """Return a table of a module; those of a `ScriptModule` are no dictionaries, and are copied into one."""
    table: Any = getattr(module, name)
    return table if isinstance(table, dict) else dict(table.items())


def own_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return a module's own parameters without those of its children, and without calling its `parameters`."""
    return [parameter for parameter in getattr(module, names.PARAMETERS).values() if parameter is not None]


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own buffers by name, without those of its children."""
    return {name: buffer for name, buffer in getattr(module, names.BUFFERS).items() if buffer is not None}


class OperationMode(names.DispatchMode):  # type: ignore[misc]  # looked up, so that it may be missing
    """A dispatch mode that sees every operation and whose use does not load the compiler (a second, amid a job)."""

    def __init__(self) -> None:
        if names.DispatchMode is object:
            raise names.MissingError("this torch has no TorchDispatchMode: operations are not followed")
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while a mode of ours is on


def is_sink(node: object) -> bool:
    """Whether an autograd node is the one that DDP puts behind a model's outputs."""
    return type(node).__name__ == names.SINK


def next_sequence() -> int:
    """Return the number that the next autograd node of this thread will get."""
    return int(names.next_sequence())


def sequence_of(node: Any) -> int:
    """Return the number of an autograd node."""
    return int(names.sequence(node)())


def module_tables(module: torch.nn.Module) -> dict[str, Any]:
    """Return the dictionaries that hold a module's parameters and buffers."""
    return {name: module.__dict__[name] for name in _TABLES if name in module.__dict__}


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` made this module or its call."""
    return hasattr(module, names.ORIGINAL) or getattr(module, names.COMPILED_CALL, None) is not None


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` has compiled the calls of a module."""
    return module.__dict__.get(names.COMPILED_CALL) is not None


def use_one_thread() -> None:
    """Limit this thread to one compute thread in a copy of a process, in which the pool's threads are missing.

    `torch.set_num_threads` would end its pool of threads, and wait for those that are not there.
    """
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        with suppress(OSError, AttributeError):
            getattr(ctypes.PyDLL("libtorch_cpu.so"), name)(1)


def syncs_statistics(module: torch.nn.Module) -> bool:
    """Whether a module's forward communicates in training: SyncBatchNorm, over more than one rank."""
    if not inherits(type(module), ("SyncBatchNorm",)) or not dist.is_initialized():
        return False
    group: Any = getattr(module, "process_group", None)
    return dist.get_world_size(group) > 1


def is_parallel(module: torch.nn.Module) -> str | None:
    """Return the kind of a module whose forward communicates (DDP, FSDP, tensor parallel); None for other modules."""
    kinds = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
    # what operations on these send is done below the mode that would see it
    if any([inherits(type(parameter), ("DTensor",)) for parameter in own_parameters(module)]):
        return "module of DTensors"
    return next(iter([name for name in kinds if inherits(type(module), (name,))]), None)
