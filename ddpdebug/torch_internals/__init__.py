"""Every use of a private torch API, behind one adapter with version probes. Nothing else may touch underscore names."""

from __future__ import annotations

import ctypes
import datetime
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time only
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.data import dataloader

from ddpdebug.torch_internals.losses import (
    aside as aside,
    is_readable as is_readable,
    look_at_losses as look_at_losses,
)
from ddpdebug.torch_internals.memory import (
    accelerator as accelerator,
    current_node as current_node,
    device_memory_limit as device_memory_limit,
    device_memory_stats as device_memory_stats,
    memory_snapshot as memory_snapshot,
    memory_summary as memory_summary,
    observe_out_of_memory as observe_out_of_memory,
    record_memory_history as record_memory_history,
    stop_memory_history as stop_memory_history,
    storage_key as storage_key,
    worker_pids as worker_pids,
)
from ddpdebug.torch_internals.modes import (
    aside_of_modes as aside_of_modes,
    can_step_aside as can_step_aside,
    dispatch_modes as dispatch_modes,
    function_modes as function_modes,
    transform as transform,
)
from ddpdebug.torch_internals.names import inherits
from ddpdebug.torch_internals.replaying import (
    OperationMode as OperationMode,
    buffers_of as buffers_of,
    clones as clones,
    drop_global_hooks as drop_global_hooks,
    hooks_of as hooks_of,
    is_compiled as is_compiled,
    is_parallel as is_parallel,
    is_sink as is_sink,
    keep_hooks as keep_hooks,
    module_tables as module_tables,
    next_sequence as next_sequence,
    own_buffers as own_buffers,
    own_parameters as own_parameters,
    saved_of as saved_of,
    sequence_of as sequence_of,
    set_version as set_version,
    syncs_statistics as syncs_statistics,
    without_global_hooks as without_global_hooks,
)

#: (what, where) pairs that this torch must offer; `missing()` names those that it does not.
PRE_FORWARD = "_pre_forward"  # the part of DDP's forward that broadcasts buffers
_PROBES: tuple[tuple[str, Any, str], ...] = (
    ("DDP forward stages", DistributedDataParallel, PRE_FORWARD),
    ("DDP join state", DistributedDataParallel, "join"),
    ("default store", dist.distributed_c10d, "_get_default_store"),
    ("default group", dist.distributed_c10d, "_update_default_pg"),
)


def missing() -> list[str]:
    """Return what this torch lacks of the private APIs that ddpdebug builds on (empty on a supported version)."""
    lacking = [f"{what} ({name})" for what, owner, name in _PROBES if not hasattr(owner, name)]
    if not dist.is_gloo_available():
        lacking.append("the gloo backend")
    return lacking


# --- the side group ---------------------------------------------------------------------------------------------------


def private_store() -> Any | None:
    """Return a store connection of our own, or None when there is none to be had yet.

    A clone never blocks the job's own store operations: torch's client serialises the calls on one connection.
    """
    if dist.is_available() and dist.is_initialized():
        store: Any = dist.distributed_c10d._get_default_store()
        return store.clone()
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "MASTER_PORT" in env:
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = TCPStore(
            env.get("MASTER_ADDR", "127.0.0.1"),
            int(env["MASTER_PORT"]),
            is_master=False,
            timeout=datetime.timedelta(seconds=60),
        )
        return PrefixStore(f"ddpdebug/attempt_{attempt}", store)
    return None


def meet(store: Any, prefix: str, rank: int, world: int, give_up: Callable[[], bool]) -> None:
    """Wait until all ranks have come here, so that what follows does not block; raise RuntimeError to give up."""
    store.set(f"{prefix}/here/{rank}", "1")
    keys = [f"{prefix}/here/{other}" for other in range(world)]
    pause = 0.005
    had_group = dist.is_initialized()
    while not (give_up() or (had_group and not dist.is_initialized())):  # with its group the job ends its store
        if store.check(keys):
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    raise RuntimeError("the other ranks are not watched by ddpdebug, or not reached")


class GlooGroup:
    """A gloo process group that torch.distributed does not know of, so that it cannot collide with the job's groups."""

    def __init__(self, store: Any, prefix: str, rank: int, world: int, timeout: datetime.timedelta) -> None:
        self._group: Any = dist.ProcessGroupGloo(PrefixStore(prefix, store), rank, world, timeout)
        self._world = world

    def gather(self, data: bytes) -> list[bytes]:
        """All-gather equally long byte strings; raise RuntimeError when a peer is gone or the timeout has passed."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        outs = [torch.empty_like(own) for _ in range(self._world)]
        work = self._group.allgather([outs], [own])
        work.wait()
        return [ctypes.string_at(out.data_ptr(), out.numel()) for out in outs]

    def close(self) -> None:
        """Make a pending `gather` fail and drop the group."""
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()


# --- DistributedDataParallel ------------------------------------------------------------------------------------------


def ignored_names(module: torch.nn.Module) -> frozenset[str]:
    """Return the names on DDP's ignore list (`_set_params_and_buffers_to_ignore_for_model`)."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def ranks_of(group: Any) -> list[int]:
    """Return the global ranks of a process group, of the default one for None."""
    return sorted(dist.get_process_group_ranks(group))


def group_ranks(ddp: DistributedDataParallel) -> list[int]:
    """Return the global ranks among which the wrapper reduces gradients."""
    return ranks_of(ddp.process_group)


def broadcasts_buffers(ddp: DistributedDataParallel) -> bool:
    """Tell whether DDP keeps buffers equal (`forward_sync_buffers`, formerly `broadcast_buffers`)."""
    return bool(getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True)))


def syncs_buffers_now(ddp: DistributedDataParallel) -> bool:
    """Tell whether this forward broadcasts buffers."""
    probe = getattr(ddp, "will_sync_module_buffers", None)
    return bool(probe()) if probe is not None else broadcasts_buffers(ddp)


def join_session(ddp: DistributedDataParallel) -> object | None:
    """Return what identifies the `join` context that the wrapper is inside of, None outside."""
    return getattr(ddp, "_join_config", None) if in_join(ddp) else None


def in_join(ddp: DistributedDataParallel) -> bool:
    """Tell whether the wrapper is inside its `join` context."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def accumulator(parameter: torch.Tensor) -> object:
    """Return the AccumulateGrad node of a parameter: DDP hooks this node, and a new one is made by re-typing."""
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
        assert node is not None
        return node.next_functions[0][0]


def unwrap_compiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside `torch.compile`'s wrapper, or the module itself."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, torch.nn.Module) else module


def leave_uncompiled(function: Any, *, nested: bool = True) -> None:
    """Keep `torch.compile` from compiling a function of ours that runs inside a compiled region, and what it calls.

    Args:
        nested: false for a wrapper around the user's code, which must be compiled as without us.
    """
    frames: Any = getattr(torch._C._dynamo, "eval_frame", None)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None and hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        inside = action.SKIP if nested else action.DEFAULT
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, inside))


def anything_compiled() -> bool:
    """Tell whether `torch.compile` was used in this process: a hook put in place now might get into a graph."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", None)
    return isinstance(backends, dict) and any(backend is not None for backend in backends.values())


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor can be read like an array: it has elements of its own, in strided memory.

    So it is not sparse (in any layout), nested, quantized, on `meta`, for oneDNN, wrapped by functorch, without memory
    yet, or of a class that does its operations itself (DTensor, fake).
    """
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _is_array(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or is_lazy(tensor):
        return False
    with as_plain():
        return _is_array(tensor)


def _is_array(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its graph, as one of the class that has no code of the user's."""
    if type(tensor) is torch.Tensor:
        return tensor.detach()
    with as_plain():
        return tensor.detach()


def norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the 2-norms of tensors; waits for a device."""
    norms = torch._foreach_norm(list(tensors))
    if all(norm.device.type == "cpu" for norm in norms):
        return [float(norm) for norm in norms]
    return [float(value) for value in torch.stack([norm.to(torch.float64) for norm in norms]).tolist()]


def found_inf_of(optimizer: object) -> torch.Tensor | None:
    """Return GradScaler's verdict for an optimizer that skips the step by itself (fused), or None."""
    found = getattr(optimizer, "found_inf", None)
    return found if isinstance(found, torch.Tensor) else None


# --- AMP --------------------------------------------------------------------------------------------------------------


def scale_of(scaler: Any) -> torch.Tensor | None:
    """Return GradScaler's scale tensor without a device synchronisation, or None before its first use."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


# --- tensors ----------------------------------------------------------------------------------------------------------

#: Keeps a tensor subclass's own code out of a look at its memory; there is no public way.
as_plain: type[AbstractContextManager[object]] = getattr(torch._C, "DisableTorchFunctionSubclass", nullcontext)


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written in place, None when it does not count (inference mode)."""
    return None if tensor.is_inference() else int(tensor._version)


# --- data -------------------------------------------------------------------------------------------------------------

#: What iterating over a DataLoader returns; batches come out of its `__next__`.
LoaderIterator: Any = dataloader._BaseDataLoaderIter


# --- names ------------------------------------------------------------------------------------------------------------


def is_sharded(optimizer: object) -> bool:
    """Tell whether the optimizer's state is sharded over ranks on purpose (ZeroRedundancyOptimizer)."""
    return inherits(type(optimizer), ("ZeroRedundancyOptimizer",))


def is_local_sgd_state(state: object) -> bool:
    """Tell whether a comm hook's state declares local SGD."""
    return inherits(type(state), ("PostLocalSGDState",))


# --- a world of one ---------------------------------------------------------------------------------------------------


@contextmanager
def alone() -> Iterator[Any]:
    """Give a process group of this process only."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@contextmanager
def as_world(group: Any) -> Iterator[None]:
    """Make `group` the default group: who asks for rank, world size or a collective gets those of `group`."""
    c10d: Any = dist.distributed_c10d
    before = c10d._get_default_group()
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(before)


@contextmanager
def one_rank() -> Iterator[None]:
    """Let what asks for the default group find a world of this process, where there is a group of several ranks."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    with alone() as group, as_world(group):
        yield
