"""The adapter for all private torch APIs; their names and availability tests are in `names.py`."""

from __future__ import annotations

import ctypes
import datetime
import inspect
import os
import struct
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time only
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddpdebug.clock import time
from ddpdebug.torch_internals import names
from ddpdebug.torch_internals.collective_calls import (
    counts_messages as counts_messages,
    look_at_collectives as look_at_collectives,
    name_of as name_of,
    own_group as own_group,
    sequence_number as sequence_number,
)
from ddpdebug.torch_internals.collectives import (
    Collectives as Collectives,
    members_of_groups as members_of_groups,
)
from ddpdebug.torch_internals.dtensors import (
    Gathering as Gathering,
    Layout as Layout,
    Place as Place,
    Reduction as Reduction,
    any_distributed as any_distributed,
    fsdp_gathers as fsdp_gathers,
    fsdp_reductions as fsdp_reductions,
    gathering_of as gathering_of,
    has_stages as has_stages,
    held_here as held_here,
    is_distributed as is_distributed,
    is_laid_like as is_laid_like,
    is_over_all_ranks as is_over_all_ranks,
    is_own as is_own,
    is_whole as is_whole,
    layout_of as layout_of,
    own_part as own_part,
    ranks_of_averages as ranks_of_averages,
    reduction_of as reduction_of,
    waits as waits,
)
from ddpdebug.torch_internals.function_code import (
    NOTED as NOTED,
    Around as Around,
    InCode as InCode,
    asked_by_woven_code as asked_by_woven_code,
    lies_around as lies_around,
    look_around as look_around,
)
from ddpdebug.torch_internals.loss_functions import (
    LOSS_MODULES as LOSS_MODULES,
    LOSSES as LOSSES,
    aside as aside,
    is_readable as is_readable,
    look_at_losses as look_at_losses,
)
from ddpdebug.torch_internals.marks import Memory as Memory, Seen as Seen
from ddpdebug.torch_internals.memory import (
    accelerator as accelerator,
    current_node as current_node,
    device_memory_limit as device_memory_limit,
    device_memory_stats as device_memory_stats,
    is_readable_memory as is_readable_memory,
    memory_snapshot as memory_snapshot,
    memory_summary as memory_summary,
    number_of_samples as number_of_samples,
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
    is_made_a_graph as is_made_a_graph,
    top_function_mode as top_function_mode,
    transform as transform,
)
from ddpdebug.torch_internals.names import (
    BUFFERS as BUFFERS,
    CALLS as CALLS,
    COLLECTIVES as COLLECTIVES,
    DYNAMO as DYNAMO,
    MODULES as MODULES,
    NEXT_INDICES as NEXT_INDICES,
    ORIGINAL as ORIGINAL,
    PARAMETERS as PARAMETERS,
    PRE_FORWARD as PRE_FORWARD,
    RUN_BACKWARD as RUN_BACKWARD,
    UPDATE_DEFAULT_GROUP as UPDATE_DEFAULT_GROUP,
    MissingError as MissingError,
    SavedTensor as SavedTensor,
    as_plain as as_plain,
    as_users as as_users,
    graph_task as graph_task,
    inherits as inherits,
    is_tracing as is_tracing,
    schema as schema,
    tell_profilers as tell_profilers,
    when_backward_ends as when_backward_ends,
)
from ddpdebug.torch_internals.replaying import (
    OperationMode as OperationMode,
    buffers_of as buffers_of,
    clones as clones,
    is_compiled as is_compiled,
    is_compiled_in_place as is_compiled_in_place,
    is_parallel as is_parallel,
    is_sink as is_sink,
    module_tables as module_tables,
    next_sequence as next_sequence,
    own_buffers as own_buffers,
    own_parameters as own_parameters,
    parameters_of as parameters_of,
    sequence_of as sequence_of,
    syncs_statistics as syncs_statistics,
    use_one_thread as use_one_thread,
)
from ddpdebug.torch_internals.trees import (
    buffers as buffers,
    children as children,
    first_parameter as first_parameter,
    groups as groups,
    hooks as hooks,
    in_train_mode as in_train_mode,
    modules as modules,
    named_buffers as named_buffers,
    named_modules as named_modules,
    named_parameters as named_parameters,
    own_attribute as own_attribute,
    own_child as own_child,
    parameters as parameters,
    params as params,
    state as state,
)
from ddpdebug.torch_internals.unlisted import unlisted as unlisted


def missing() -> list[str]:
    """Return the names that ddpdebug needs and this torch lacks, each with its consequence (empty if supported)."""
    lacking = [f"{name.path} ({name.off})" for name in names.missing()]
    if not dist.is_gloo_available():
        lacking.append("the gloo backend (the ranks are not compared)")
    return lacking


# --- the side group ---------------------------------------------------------------------------------------------------

#: A rank sends no more than this at once.
_MOST_BYTES = 1 << 30


def private_store() -> Any | None:
    """Return a separate connection to the job's store; None if there is no store yet.

    A clone never blocks the job's own store operations: torch's client serialises the calls on one connection.

    Raises:
        ConnectionError: the job's store cannot be had a second time (one written in Python has no `clone`).
    """
    if dist.is_available() and dist.is_initialized():
        store: Any = names.default_store()
        try:
            return own_connection(store)
        except Exception as error:
            raise ConnectionError(f"the job's store gives no connection of our own: {error}") from error
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


def own_connection(store: Any) -> Any:
    """Return another connection to a store.

    Where torch has no `clone` a new connection knows nothing of the prefixes around the old one: the ranks agree, over
    the old one, on a prefix that is nobody else's. A store of the process itself has no connection.
    """
    if hasattr(store, "clone"):  # torch 2.6 has none
        return store.clone()
    inner: Any = store
    while issubclass(type(inner), PrefixStore):
        inner = inner.underlying_store
    kind = type(inner)
    if issubclass(kind, HashStore):
        return store
    if issubclass(kind, TCPStore):
        fresh: Any = TCPStore(inner.host, inner.port, is_master=False, timeout=store.timeout, wait_for_workers=False)
    elif issubclass(kind, FileStore):  # its file is removed by the last of so many processes
        fresh = FileStore(inner.path, dist.get_world_size())
    else:
        raise TypeError(f"{kind.__name__} has no `clone`")
    prefix = store.compare_set("ddpdebug/connection", "", uuid.uuid4().hex).decode()
    return PrefixStore(f"ddpdebug/{prefix}", fresh)


def group_module() -> Any:
    """Return torch's module in which the default process group is made."""
    return dist.distributed_c10d


def default_group_id() -> object | None:
    """Return an identity of the job's default process group, None while there is none; does not keep the group alive.

    It is no address: a group is often made where the one before it was.
    """
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if group is None else weakref.ref(group)  # the script may end it between two lines


def store_host(store: Any) -> str:
    """Return the host name by which this rank reaches the job's store; empty if it is no TCPStore."""
    with suppress(Exception):  # a store of the user's may do anything
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return str(store.host) if isinstance(store, TCPStore) else ""
    return ""


def gloo_devices(address: str) -> list[Any]:
    """Return the devices of the job's gloo group, or one that listens at an address; empty for gloo's default.

    A device is a listening port and a thread that wakes up a hundred times a second. Nothing of the job's group is
    changed by another group that has connections of its own there.
    """
    try:
        backend: Any = getattr(names.default_group(), names.GET_BACKEND)(torch.device("cpu"))
        if devices := list(getattr(backend.options, names.GLOO_DEVICES)):
            return devices
    except Exception:  # noqa: BLE001, S110 - no group yet, NCCL alone, a wrapper, another version of torch
        pass
    if not address or os.environ.get("GLOO_SOCKET_IFNAME"):
        return []
    with suppress(Exception):  # not an address of this host after all, or another version of torch
        return [names.ProcessGroupGloo.create_device(hostname=address)]
    return []


def _gloo_options(devices: Sequence[Any], timeout: datetime.timedelta) -> tuple[Any, ...]:
    """Return options for a group on these devices, none where there are none."""
    if not devices:
        return ()
    try:
        options: Any = getattr(names.ProcessGroupGloo, names.GLOO_OPTIONS)()
        given = {names.GLOO_DEVICES: list(devices), names.GLOO_THREADS: 1, names.GLOO_TIMEOUT: timeout}
        for name, value in given.items():
            setattr(options, name, value)
    except Exception:  # noqa: BLE001 - another version of torch
        return ()
    return (options,)


def _size(told: bytes) -> int:
    """Return the number of bytes that a rank announces; raise RuntimeError where its memory must be damaged."""
    size = int.from_bytes(told, "little")
    if size > _MOST_BYTES:
        raise RuntimeError(f"a rank announces {size} bytes")
    return size


def _keep_for_ever(*things: object) -> None:
    """Keep objects alive beyond the end of the interpreter."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class Words:
    """Messages in a group's store from ranks that leave, for the others, whose gathers are about to fail."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = PrefixStore(f"{prefix}/words", store)

    def leave_word(self, text: str) -> None:
        """Store the reason why this rank leaves."""
        self._store.set("last", text)

    def word(self) -> str | None:
        """Return the reason that a rank has left behind; None if there is none."""
        return self._store.get("last").decode("utf-8", "replace") if self._store.check(["last"]) else None


class GlooGroup:
    """A gloo process group outside torch.distributed's tables, so that it cannot collide with the job's groups.

    Args:
        prefix: of its keys in the store, never used before.
        unanswered: called now and then with the seconds for which a gather has been waited for.
        address: to listen at, where the job has no gloo group; by default wherever gloo does by itself.
        timeout: of one gather. Connecting may take `CONNECT_SECONDS`: everybody is known to be there.
    """

    CONNECT_SECONDS = 60.0
    SLICE = datetime.timedelta(seconds=0.5)

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        world: int,
        timeout: datetime.timedelta,
        unanswered: Callable[[float], None] = lambda seconds: None,
        address: str = "",
    ) -> None:
        self._rank, self._world, self._timeout = rank, world, timeout
        self._unanswered, self._waits = unanswered, False
        words = Words(store, prefix)
        self.leave_word, self.word = words.leave_word, words.word
        connecting = datetime.timedelta(seconds=self.CONNECT_SECONDS)
        self._group: Any = names.ProcessGroupGloo(
            PrefixStore(prefix, store), rank, world, *_gloo_options(gloo_devices(address), connecting) or (connecting,)
        )

    def gather(self, data: bytes) -> list[bytes]:
        """All-gather equally long byte strings; raise RuntimeError if a peer is gone or the time is out."""
        group = self._alive()
        own = _bytes_of(data)
        outs = [unlisted(torch.empty_like(own)) for _ in range(self._world)]
        options = names.AllgatherOptions()
        options.timeout = self._timeout
        self._wait(group.allgather([outs], [own], options), own, *outs)
        return [ctypes.string_at(out.data_ptr(), out.numel()) for out in outs]

    def _wait(self, work: Any, *tensors: torch.Tensor) -> None:
        """Wait in slices: a wait that is too short says so without ending what it waits for.

        Where torch's `abort` ends nothing (2.8), a thread of torch's has the tensors until the silent rank is gone. It
        may be while the interpreter ends, and a thread that then lets go of a Python object takes the process along.
        """
        started, self._waits = time.monotonic(), True
        while self._waits:
            try:
                work.wait(self.SLICE)
                self._waits = False
            except RuntimeError:
                if work.is_completed():
                    self._waits = False
                    work.wait()  # it has ended in this moment, well or with an error of its own
                # who is silent may be so for long after `close`; and a thread that comes back from `wait` while the
                # interpreter ends takes the process with it
                elif self._group is None or time.monotonic() - started > self._timeout.total_seconds():
                    _keep_for_ever(*tensors)
                    raise
                else:
                    self._unanswered(time.monotonic() - started)

    def collect(self, data: bytes) -> list[bytes] | None:
        """Gather byte strings of any length on the first rank; None on the others."""
        sizes = [_size(size) for size in self.gather(len(data).to_bytes(8, "little"))]
        group, longest = self._alive(), max(sizes)
        own = _bytes_of(data.ljust(longest, b"\0"))
        leads = self._rank == 0
        outs = [unlisted(torch.empty_like(own)) for _ in range(self._world)] if leads else []
        options = names.GatherOptions()
        options.rootRank, options.timeout = 0, self._timeout
        self._wait(group.gather([outs] if leads else [], [own], options), own, *outs)
        if not leads:
            return None
        return [ctypes.string_at(out.data_ptr(), size) for out, size in zip(outs, sizes, strict=True)]

    def spread(self, data: bytes | None) -> bytes:
        """Broadcast the first rank's data; return it on every rank."""
        head = self._broadcast((len(data or b"")).to_bytes(8, "little"))
        return self._broadcast(data if self._rank == 0 and data is not None else bytes(_size(head)))

    def _broadcast(self, data: bytes) -> bytes:
        tensor = _bytes_of(data)
        options = names.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        self._wait(self._alive().broadcast([tensor], options), tensor)
        return ctypes.string_at(tensor.data_ptr(), tensor.numel())

    def _alive(self) -> Any:
        if self._group is None:
            raise RuntimeError("the side group is closed")
        return self._group

    def close(self) -> None:
        """Make a pending `gather` fail, soon after `SLICE`, and drop the group."""
        group, self._group = self._group, None
        if group is not None:
            if self._waits:  # its destructor would wait as well, in whoever lets go of it last: nobody does
                _keep_for_ever(group)
            if hasattr(group, "abort"):
                group.abort()


def _bytes_of(data: bytes) -> torch.Tensor:
    """Return a tensor on a copy of some bytes."""
    return unlisted(torch.frombuffer(bytearray(data), dtype=torch.uint8))


# --- DistributedDataParallel ------------------------------------------------------------------------------------------


def ignored_names(module: torch.nn.Module) -> frozenset[str]:
    """Return the names on DDP's ignore list (`_set_params_and_buffers_to_ignore_for_model`)."""
    return frozenset(own_attribute(module, names.IGNORED, ()))


def groups_beside(largest: int = 64, most: int = 8) -> list[tuple[int, ...]]:
    """Return the ranks of the script's process groups with this rank, except the groups of all ranks."""
    if not dist.is_initialized():
        return []
    tables = getattr(names.group_world, "pg_group_ranks", None) or {}
    found = {tuple(sorted(ranks)) for ranks in tables.values() if dist.get_rank() in ranks}
    return sorted(ranks for ranks in found if 1 < len(ranks) < min(dist.get_world_size(), largest + 1))[:most]


def ranks_of(group: Any) -> list[int]:
    """Return the global ranks of a process group; of the default group for None."""
    # torch 2.6 does not take None for it
    return sorted(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def group_ranks(ddp: DistributedDataParallel) -> list[int]:
    """Return the global ranks among which the wrapper reduces gradients."""
    return ranks_of(ddp.process_group)


def broadcasts_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether DDP broadcasts buffers (`forward_sync_buffers`, formerly `broadcast_buffers`)."""
    return bool(own_attribute(ddp, "forward_sync_buffers", own_attribute(ddp, "broadcast_buffers", True)))


def reduces_next(ddp: DistributedDataParallel) -> bool:
    """Whether DDP reduces in the backward of a forward that begins now: outside of `no_sync`."""
    return bool(own_attribute(ddp, "require_backward_grad_sync", True))


def syncs_buffers_now(ddp: DistributedDataParallel) -> bool:
    """Whether DDP broadcasts its buffers in this forward."""
    probe = getattr(ddp, names.SYNCS_BUFFERS, None)
    return bool(probe()) if probe is not None else broadcasts_buffers(ddp)


def reduces_in_place(ddp: DistributedDataParallel) -> bool:
    """Whether the wrapper's reduction may change `.grad` before the backward has ended."""
    attributes = ("gradient_as_bucket_view", "static_graph", "mixed_precision", names.PYTHON_REDUCER)
    return any([own_attribute(ddp, name) for name in attributes])


def join_session(ddp: DistributedDataParallel) -> object | None:
    """Return the object that identifies the `join` context around the wrapper; None outside of one."""
    return getattr(ddp, names.JOIN_CONFIG, None) if in_join(ddp) else None


def in_join(ddp: DistributedDataParallel) -> bool:
    """Whether the wrapper is inside its `join` context."""
    return bool(getattr(getattr(ddp, names.JOIN_CONFIG, None), "enable", False))


def accumulator(parameter: torch.Tensor) -> object | None:
    """Return the AccumulateGrad node of a parameter, which DDP hooks; re-typing the parameter makes a new one.

    None while the parameter is frozen: then nothing leads to its node.
    """
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
    return None if node is None else node.next_functions[0][0]


def unwrap_compiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside `torch.compile`'s wrapper, or the module itself."""
    inner = own_child(module, names.ORIGINAL)
    return module if inner is None else inner


def leave_uncompiled(function: Any, *, nested: bool = True) -> None:
    """Exclude a function of ddpdebug, and its callees, from compilation inside a `torch.compile` region.

    Args:
        nested: false for a wrapper around the user's code, which must be compiled as without us.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    change, action, strategy = names.set_exec_strategy, names.FrameAction, names.FrameExecStrategy
    if code is not None and None not in (change, action, strategy):
        change(code, strategy(action.SKIP, action.SKIP if nested else action.DEFAULT))


def anything_compiled() -> bool:
    """Whether `torch.compile` was used in this process: a hook installed now might get into a graph."""
    backends = names.compiled_backends() if names.DYNAMO in sys.modules else None
    return isinstance(backends, dict) and any([backend is not None for backend in backends.values()])


#: Bytes of the state of torch's generator on the CPU, where its 624 words begin, and what one takes.
_TWISTER_BYTES, _TWISTER_WORDS, _TWISTER_WORD = 5056, 24, 8


def mersenne_position(state: bytes) -> tuple[bytes, int, int] | None:
    """Return the block of torch's CPU generator, the number of its 624 values used, and the seed, from its state.

    None where the state has another form than torch gives it today.
    """
    if len(state) != _TWISTER_BYTES:
        return None
    seed, left, seeded = struct.unpack_from("<Qii", state)
    if seeded != 1 or not 1 <= left <= 624:
        return None
    block = state[_TWISTER_WORDS : _TWISTER_WORDS + 624 * _TWISTER_WORD]
    return block, 625 - left, seed


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be read like an array: elements of its own in strided memory.

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
    return not names.is_functorch_wrapped(tensor)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its graph, as a plain `torch.Tensor` without user code."""
    if type(tensor) is torch.Tensor:
        return tensor.detach()
    with as_plain():
        return tensor.detach()


#: Classes of tensors that have no code of somebody else's, and what one operation takes many of.
_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})
_REAL = frozenset({torch.float32, torch.float64})


def are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one operation can read many tensors: plain ones of one real dtype in host memory.

    One look at each where `is_plain` and what else is asked of a single tensor takes ten; false says nothing.
    """
    if not tensors or not {*map(type, tensors)} <= _CLASSES:
        return False
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not dtypes <= _REAL or False in {tensor.is_cpu for tensor in tensors}:
        return False
    if True in {tensor.is_nested or names.is_functorch_wrapped(tensor) for tensor in tensors}:
        return False
    if {tensor.layout for tensor in tensors} != {torch.strided}:
        return False
    return 0 not in {tensor.untyped_storage().nbytes() for tensor in tensors}  # not freed under them


def norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the 2-norm of each tensor, of any shape and floating dtype, as Python numbers; waits for a device."""
    norms = names.foreach_norm(list(tensors))
    if all([norm.device.type == "cpu" for norm in norms]):
        values: list[float] = torch.stack(list(norms)).tolist() if norms else []
        return values
    return [float(value) for value in torch.stack([norm.to(torch.float64) for norm in norms]).tolist()]


def norms_there(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Return the 2-norms of tensors of one floating dtype as zero-dimensional tensors of `dtype`, without waiting."""
    return [unlisted(norm) for norm in names.foreach_norm(list(tensors), 2, dtype=dtype)]


def distances(
    before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return the 2-norms of tensors, and of their differences from others, without waiting for a device."""
    if not before:
        return [], []
    return names.foreach_norm(list(before)), names.foreach_norm(names.foreach_sub(list(after), list(before)))


def found_inf_of(optimizer: object) -> torch.Tensor | None:
    """Return GradScaler's `found_inf` of an optimizer that skips the step by itself (fused); None if there is none."""
    found = getattr(optimizer, names.FOUND_INF, None)
    return found if isinstance(found, torch.Tensor) else None


# --- AMP --------------------------------------------------------------------------------------------------------------


def is_scaling(scaler: Any) -> bool:
    """Whether a GradScaler is enabled."""
    return bool(own_attribute(scaler, names.SCALES))


def scale_of(scaler: Any) -> torch.Tensor | None:
    """Return GradScaler's scale tensor without a device synchronisation; None before its first use."""
    scale = own_attribute(scaler, names.SCALE)
    return scale if isinstance(scale, torch.Tensor) else None


# --- tensors ----------------------------------------------------------------------------------------------------------


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor with the same memory and the same version counter, unseen by dispatch modes.

    It carries no graph and needs no gradient.
    """
    with names.without_dispatch_keys():
        return unlisted(tensor.detach())


def is_traced() -> bool:
    """Whether `torch.jit.trace` records the present operations."""
    return names.tracing_state() is not None


def is_leaf(module: torch.nn.Module) -> bool:
    """Whether a module has no children; `children()` is a generator over a set, which costs ten times as much."""
    children = getattr(module, names.MODULES)
    return not children or all([child is None for child in children.values()])


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the number of in-place writes to a tensor; None if it does not count them (inference mode).

    Of a DTensor the part that this rank holds counts as well: FSDP2 adds gradients to that, the script writes to the
    whole.
    """
    part = held_here(tensor)
    if part.is_inference():
        return None
    return int(names.version(part)) + (0 if part is tensor else int(names.version(tensor)))


def places_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return each tensor's memory address and version counter; both change when the tensor is replaced.

    A write through `.data` moves neither.

    Raises:
        RuntimeError: a tensor has no memory of its own, or does not count (inference mode).
    """
    written = names.version
    return [(tensor.data_ptr(), written(tensor)) for tensor in tensors]


# --- data -------------------------------------------------------------------------------------------------------------

#: What iterating over a DataLoader returns; batches come out of its `__next__`.
LoaderIterator: Any = names.LoaderIterator


# --- names ------------------------------------------------------------------------------------------------------------


def is_sharded(optimizer: object) -> bool:
    """Whether the optimizer's state is sharded over ranks on purpose (ZeroRedundancyOptimizer)."""
    return inherits(type(optimizer), ("ZeroRedundancyOptimizer",))


def is_local_sgd_state(state: object) -> bool:
    """Whether a comm hook's state declares local SGD."""
    return inherits(type(state), ("PostLocalSGDState",))


# --- a world of one ---------------------------------------------------------------------------------------------------

_claimed = False


def claim_process() -> None:
    """Declare that ddpdebug has started this process for a measurement: no user's training runs in it."""
    global _claimed  # noqa: PLW0603 - it is the process that is claimed
    _claimed = True


def is_claimed() -> bool:
    """Whether process-wide state may be changed for a while: no user trains here, or a pytest test runs."""
    return _claimed or ("pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ)


@contextmanager
def alone() -> Iterator[Any]:
    """Yield a process group of this process only.

    Raises:
        RuntimeError: the process is not claimed.
    """
    if not is_claimed():
        raise RuntimeError("a training process may not be made a world of its own")
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@contextmanager
def as_world(group: Any) -> Iterator[None]:
    """Make `group` the default group during the body: rank, world size and collectives are those of `group`.

    Any thread does, so that this is for processes in which nothing else runs: `alone` sees to that.
    """
    before = names.default_group()
    names.update_default_group(group)
    try:
        yield
    finally:
        names.update_default_group(before)


@contextmanager
def one_rank() -> Iterator[None]:
    """Make a world of this process the default group during the body, if there is a group of several ranks.

    Raises:
        RuntimeError: the process is not claimed, and there is such a group.
    """
    if not is_one_of_several():
        yield
        return
    with alone() as group, as_world(group):
        yield


def is_one_of_several() -> bool:
    """Whether this process belongs to a default group of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
