"""All private names of torch that ddpdebug uses: the purpose of each, and the probe that is off without it.

Nothing else in ddpdebug touches a name of torch's with an underscore (`tests/torch_internals/test_private_names.py`).
A name that this torch has not is said when ddpdebug attaches; what needs it is left out, or switches its part off when
it meets it. The training goes on as without ddpdebug. Of a name that is not in the oldest supported torch `since` says
which one brought it; before that only `ddpdebug doctor` says that it is missing, which prints the table. Names of
autograd's nodes are in `nodes.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ddpdebug.torch_internals.lookup import (
    TABLE as TABLE,
    Feature as Feature,
    MissingError as MissingError,
    Name as Name,
    has,
    key,
    later,
    load,
    named_in as named_in,
    reader,
    register,
    resolve,
    thing,
)


def inherits(kind: type, names: Iterable[str]) -> bool:
    """Whether a class or one of its bases has one of the names, so that the classes need not be imported."""
    wanted = set(names)
    return any([base.__name__ in wanted for base in type.__getattribute__(kind, "__mro__")])


def _cuda() -> bool:
    return bool(torch.backends.cuda.is_built())


def _none() -> None:
    return None


def _nothing(**_: object) -> bytes:
    return b""


def _many() -> int:
    return sys.maxsize


def _no_task() -> int:
    return -1


def _none_of(_: object) -> None:
    return None


def _no(*_: object) -> bool:
    return False


def _each_cloned(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def _each_norm(
    tensors: Iterable[torch.Tensor], order: int = 2, *, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.DistributedDataParallel"
_MODULE = "torch.nn.Module"

# --- comparing ranks --------------------------------------------------------------------------------------------------

_RANKS = Feature("comparing the ranks", "the ranks are not compared")
default_store: Callable[[], Any] = thing(f"{_C10D}._get_default_store", _RANKS)
ProcessGroupGloo: Any = thing("torch.distributed.ProcessGroupGloo", _RANKS, applies=dist.is_available)
AllgatherOptions: Any = thing(f"{_C10D}.AllgatherOptions", _RANKS, applies=dist.is_available)
BroadcastOptions: Any = thing(f"{_C10D}.BroadcastOptions", _RANKS, applies=dist.is_available)
GatherOptions: Any = thing(f"{_C10D}.GatherOptions", _RANKS, applies=dist.is_available)

_DEVICE = Feature("sharing gloo's device", "the ranks are compared over a listening port and a thread of their own")
GET_BACKEND = key("torch.distributed.ProcessGroup._get_backend", _DEVICE, applies=dist.is_available)
GLOO_OPTIONS = key("torch.distributed.ProcessGroupGloo._Options", _DEVICE, applies=dist.is_gloo_available)
GLOO_DEVICES, GLOO_THREADS, GLOO_TIMEOUT = (
    key(f"torch.distributed.ProcessGroupGloo._Options.{name}", _DEVICE, applies=dist.is_gloo_available)
    for name in ("_devices", "_threads", "_timeout")
)

_ALONE = Feature("a world of one rank", "`equivalence` and `preflight` cannot run one rank of several alone")
default_group: Callable[[], Any] = thing(f"{_C10D}._get_default_group", _ALONE)
#: What every way to make or end the default process group calls, by whatever name a script has imported that.
UPDATE_DEFAULT_GROUP = key(
    f"{_C10D}._update_default_pg",
    _ALONE,
    off="ranks of `mp.spawn` are not seen; `equivalence` and `preflight` cannot run one rank of several alone",
    applies=dist.is_available,
)


def update_default_group(group: Any) -> None:
    """Make a process group the default one."""
    getattr(dist.distributed_c10d, UPDATE_DEFAULT_GROUP)(group)


# --- DistributedDataParallel ------------------------------------------------------------------------------------------

_GROUPS = Feature("groups that the script has made", "ranks that share batches on purpose may be reported as an error")
group_world: Any = thing(f"{_C10D}._world", _GROUPS, otherwise=None)

_HANGS = Feature("torch's record of collectives", "of a hang it is not known which collective is waited in")
#: Torch's own record of the collectives of this process; public is only the tool that reads it from files.
dump_flight_recorder: Callable[..., bytes] = thing(
    "torch._C._distributed_c10d._dump_fr_trace", _HANGS, otherwise=_nothing, applies=dist.is_available, since=(2, 8)
)
#: How many collectives a group counts; on gloo also messages from rank to rank.
SEQUENCE_NUMBER = key(
    "torch.distributed.ProcessGroup._get_sequence_number_for_group", _HANGS, applies=dist.is_available
)

#: Functions in which the ranks meet in the store, by which a frame of a stack is known.
MEETINGS = (
    *(
        key(
            f"{_C10D}.{name}", _HANGS, applies=dist.is_available, off="a rank that waits in the store is not recognised"
        )
        for name in ("_store_based_barrier", "_new_process_group_helper")
    ),
    "init_process_group",
    "rendezvous",
)

_WRAPPER = Feature("what DDP does", "what DDP does to buffers, inputs and uneven ranks is not known")
#: The part of DDP's forward that broadcasts buffers.
PRE_FORWARD = key(f"{_DDP}._pre_forward", _WRAPPER, off="buffers are not looked at after a broadcast, no step is kept")
SYNCS_BUFFERS = key(f"{_DDP}.will_sync_module_buffers", _WRAPPER, off="forwards are taken to sync buffers")
JOIN_CONFIG = key(
    "torch.distributed.algorithms.join.Joinable._join_config",
    _WRAPPER,
    stored_by="torch.distributed.algorithms.join.Joinable.__init__",
    off="ranks that shadow the others inside `join` are taken for ranks that train",
)
IGNORED = key(
    f"{_DDP}._ddp_params_and_buffers_to_ignore",
    _WRAPPER,
    stored_by=f"{_DDP}._set_params_and_buffers_to_ignore_for_model",
    off="parameters on DDP's ignore list are compared all the same",
)
#: Whether hooks in Python reduce, one gradient at a time and in place.
PYTHON_REDUCER = key(
    f"{_DDP}._use_python_reducer", _WRAPPER, stored_by=f"{_DDP}.__init__", off="it is taken not to be used"
)
#: The node that DDP puts behind a model's outputs.
SINK = (
    key("torch.nn.parallel.distributed._DDPSink", _WRAPPER, off="the loss is not followed through DDP's own node")
    + "Backward"
)

# --- the optimizer ----------------------------------------------------------------------------------------------------

_OPTIMIZER = Feature("scaler and schedulers", "the loss scale and skipped steps are not known")
SCALES = key("torch.amp.GradScaler._enabled", _OPTIMIZER, stored_by="torch.amp.GradScaler.__init__")
SCALE = key("torch.amp.GradScaler._scale", _OPTIMIZER, stored_by="torch.amp.GradScaler.__init__")
FOUND_INF = key(
    "torch.optim.Optimizer.found_inf",
    _OPTIMIZER,
    stored_by="torch.amp.GradScaler.step",
    off="steps that a fused optimizer skips are taken for steps",
)
MILESTONES = key(
    "torch.optim.lr_scheduler.SequentialLR._milestones",
    _OPTIMIZER,
    stored_by="torch.optim.lr_scheduler.SequentialLR.__init__",
    off="a schedule of several parts whose length is counted in another unit is not seen",
)
SCHEDULERS = key(
    "torch.optim.lr_scheduler.SequentialLR._schedulers",
    _OPTIMIZER,
    stored_by="torch.optim.lr_scheduler.SequentialLR.__init__",
    off="schedulers inside of schedulers are not looked at",
)

_ENDS = Feature("the end of a backward", "each gradient is read by itself, as it comes")
graph_task: Callable[[], int] = thing("torch._C._current_graph_task_id", _ENDS, otherwise=_no_task)
when_backward_ends: Callable[[Callable[[], object]], None] = thing(
    "torch.autograd.Variable._execution_engine.queue_callback", _ENDS
)

_NORMS = Feature("norms of many tensors at once", "the size of updates is not measured")
foreach_norm: Callable[..., Any] = thing(
    "torch._foreach_norm", _NORMS, otherwise=_each_norm, off="each norm is an operation of its own"
)
foreach_sub: Callable[..., Any] = thing("torch._foreach_sub", _NORMS)

# --- tensors ----------------------------------------------------------------------------------------------------------

_TENSORS = Feature(
    "writes to tensors",
    "writes in place are not known: no inputs are kept, modules and their results are not looked at",
)
version: Callable[[Any], int] = reader("torch.Tensor._version", _TENSORS)
storage_id: Callable[[Any], int] = reader("torch.UntypedStorage._cdata", _TENSORS, off="memory is not counted")
is_functorch_wrapped: Callable[[Any], bool] = thing(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    _TENSORS,
    otherwise=_no,
    off="tensors of `torch.func` transforms are taken for plain ones",
)

_STAND_ASIDE = Feature("unseen by modes and tensor classes", "modes and tensor classes of yours see operations of ours")
#: How many modes lie on this thread's stacks; where torch does not report it, it is as if there always were some.
dispatch_modes: Callable[[], int] = thing(
    "torch._C._len_torch_dispatch_stack",
    _STAND_ASIDE,
    otherwise=_many,
    off="each look takes some 10 us longer: it steps aside of modes also where there are none",
)
function_modes: Callable[[], int] = thing(
    "torch._C._len_torch_function_stack",
    _STAND_ASIDE,
    otherwise=_many,
    off="each look takes some 10 us longer: it steps aside of modes also where there are none",
)
_GRAPHS_OFF = "what is made a graph, or runs with fake tensors, is looked at"
#: The dispatch mode of a kind that lies on this thread's stack, None without one.
dispatch_mode: Callable[[Any], object | None] = thing(
    "torch._C._get_dispatch_mode", _STAND_ASIDE, otherwise=_none_of, off=_GRAPHS_OFF
)
#: The same of the modes above autograd, which are on no stack of a thread: of `make_fx(pre_dispatch=True)`, and export.
pre_dispatch_mode: Callable[[Any], object | None] = thing(
    "torch._ops._get_dispatch_mode_pre_dispatch", _STAND_ASIDE, otherwise=_none_of, off=_GRAPHS_OFF
)
MODE_KINDS: Any = thing("torch._C._TorchDispatchModeKey", _STAND_ASIDE, otherwise=None, off=_GRAPHS_OFF)
#: The mode over torch's functions that the next one is given to first, None without any.
top_function_mode: Callable[[], object | None] = thing(
    "torch.overrides._get_current_function_mode",
    _STAND_ASIDE,
    otherwise=_none,
    off="the recording of a preflight stays in place, and does nothing, until the process ends",
)
#: The innermost `torch.func` transform (vmap, grad, functionalize) that runs, None outside of all.
transform: Callable[[], object | None] = thing(
    "torch._C._functorch.peek_interpreter_stack",
    _STAND_ASIDE,
    otherwise=_none,
    off="what runs inside `torch.func` transforms is looked at",
)
without_dispatch: Any = thing(
    "torch.utils._python_dispatch._disable_current_modes",
    _STAND_ASIDE,
    otherwise=None,
    off="nothing is looked at while a mode is active",
)
without_function: Any = thing(
    "torch._C.DisableTorchFunction",
    _STAND_ASIDE,
    otherwise=None,
    off="nothing is looked at while a mode is active, and no loss is seen that is computed without gradients",
)
#: Keeps a tensor subclass's own code (`__torch_function__`) out of what we do; there is no public way.
as_plain: type[AbstractContextManager[object]] = thing(
    "torch._C.DisableTorchFunctionSubclass", _STAND_ASIDE, otherwise=nullcontext
)
#: The contrary, for a forward of the user's that we run.
as_users: type[AbstractContextManager[object]] = thing(
    "torch._C._EnableTorchFunction",
    _STAND_ASIDE,
    otherwise=nullcontext,
    off="a forward that is replayed runs without the `__torch_function__` of its tensors",
)
#: Whether profilers and execution traces are told of the operations of this thread.
tell_profilers: Callable[[bool], object] = thing(
    "torch._C._autograd._enable_record_function",
    _STAND_ASIDE,
    otherwise=_no,
    off="profilers and execution traces of yours list operations of ours",
)
without_dispatch_keys: Any = thing(
    "torch._C._DisableTorchDispatch", _STAND_ASIDE, off="inputs of a step are not kept for its replay"
)
tracing_state: Callable[[], object | None] = thing(
    "torch._C._get_tracing_state", _STAND_ASIDE, otherwise=_none, off="what `torch.jit.trace` records is looked at"
)
is_tracing: Callable[[], bool] = thing(
    "torch._C._is_tracing", _STAND_ASIDE, otherwise=_no, off="what `torch.jit.trace` records is looked at"
)

# --- modules ----------------------------------------------------------------------------------------------------------

_TREE = Feature("the tables of modules", "models are not looked at")
PARAMETERS, BUFFERS, MODULES = (
    key(f"{_MODULE}.{name}", _TREE, stored_by=f"{_MODULE}.__init__") for name in ("_parameters", "_buffers", "_modules")
)

_HOOKS = Feature("hooks on modules", "hooks that a script registers again in each step are not noticed")
#: A module's hooks: of its forward, before it, and of its backward.
MODULE_HOOKS = tuple([
    key(f"{_MODULE}.{name}", _HOOKS, stored_by=f"{_MODULE}.__init__")
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
])  # fmt: skip
#: Hooks on a tensor, of its gradient.
TENSOR_HOOKS = key("torch.Tensor._backward_hooks", _HOOKS)

_LOSSES = Feature("loss modules", "validation losses of `torch.nn`'s loss modules are not seen")
loss_module: Any = thing("torch.nn.modules.loss._Loss", _LOSSES, otherwise=None)

_CALLS = Feature("the calls of modules and of backward", "the module that ran out of memory is not named")
#: Functions of torch's by which a frame of a stack is known.
CALLS = tuple([key(f"{_MODULE}.{name}", _CALLS) for name in ("_call_impl", "_wrapped_call_impl")])
RUN_BACKWARD = key(
    "torch.autograd.graph._engine_run_backward", _CALLS, off="running out of memory in backward is not recognised"
)

# --- autograd ---------------------------------------------------------------------------------------------------------

_GRAPH = Feature("reading the autograd graph", "no step is replayed, and the loss's operations are not named")
next_sequence: Callable[[], int] = thing("torch._C._autograd._get_sequence_nr", _GRAPH)
foreach_clone: Callable[..., Any] = thing(
    "torch._foreach_clone", _GRAPH, otherwise=_each_cloned, since=(2, 12), off="each copy is an operation of its own"
)
current_node: Callable[[], Any] = thing(
    "torch._C._current_autograd_node", _GRAPH, otherwise=_none, off="operations of backward are not named by their line"
)


def _node() -> Any:
    return torch.ones(2, requires_grad=True).log_softmax(0).grad_fn


def _node_has(name: str) -> bool:
    return hasattr(_node(), name)


sequence: Callable[[Any], Any] = reader(
    "torch.autograd.graph.Node._sequence_nr", _GRAPH, found=functools.partial(_node_has, "_sequence_nr"), by_doctor=True
)
_SAVED = Feature("what nodes have saved", "the recipe of the loss is not read: softmax, labels, shapes")
INPUT_METADATA = key(
    "torch.autograd.graph.Node._input_metadata",
    _SAVED,
    found=functools.partial(_node_has, "_input_metadata"),
    by_doctor=True,
)
#: What the names of what a node has saved begin with; without raw ones a hook of the user's would have to run.
SAVED = key(
    "torch.autograd.graph.Node._saved_", _SAVED, found=functools.partial(_node_has, "_saved_dim"), by_doctor=True
)
RAW_SAVED = key(
    "torch.autograd.graph.Node._raw_saved_",
    _SAVED,
    found=functools.partial(_node_has, "_raw_saved_result"),
    by_doctor=True,
)
#: Of a saved tensor: what is kept, and the hook that would have to run to get it.
SAVED_DATA, SAVED_HOOK = (
    key(
        f"torch._C._autograd.SavedTensor.{name}",
        _SAVED,
        off="`saved_tensors_hooks` is wrapped, and nothing is read of nodes that were made inside of it",
        since=(2, 12),
    )
    for name in ("data", "unpack_hook")
)
#: What puts hooks on a saved tensor; where those cannot be seen, it is wrapped.
SavedTensor: Any = thing("torch._C._autograd.SavedTensor", _SAVED, otherwise=type("Nobody", (), {}))

# --- operations -------------------------------------------------------------------------------------------------------

_OPERATIONS = Feature("following operations", "no step is replayed, and two runs are not compared by operation")
DispatchMode: Any = thing("torch.utils._python_dispatch.TorchDispatchMode", _OPERATIONS, otherwise=object)
SKIPS_DYNAMO = register(
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
    _OPERATIONS,
    off="a replay may load the compiler, which takes a second",
    since=(2, 11),
)
schema: Callable[[Any], Any] = reader(
    "torch._ops.OpOverload._schema", _OPERATIONS, stored_by="torch._ops.OpOverload.__init__"
)


def _operation(path: str) -> bool:
    load(path)
    return has(path)


#: Namespaces of operations that communicate, with one operation of each.
COLLECTIVES = frozenset(
    {"c10d", "c10d_functional", "symm_mem"}
    | {
        register(
            f"torch.ops.{path}",
            _OPERATIONS,
            off="a replay of a forward that communicates by these may hang until its time is over",
            found=functools.partial(_operation, f"torch.ops.{path}"),
            applies=dist.is_available,
            by_doctor=True,
        ).path.split(".")[2]
        for path in (
            "_c10d_functional.all_reduce",
            "_c10d_functional_autograd.all_to_all_single",
            "_dtensor.shard_dim_alltoall",
        )
    }
)

# --- sharded training -------------------------------------------------------------------------------------------------

_SHARDS = Feature("which ranks FSDP2 averages over", "batches of ranks that share parts of parameters are not compared")
_FSDP = "torch.distributed.fsdp"


def _fsdp_has(place: str, name: str) -> bool:
    load(f"{place}.{name}")
    return has(f"{place}.{name}") or named_in(f"{place}.__init__", name)


FSDP_STATE = key(
    f"{_FSDP}.FSDPModule._get_fsdp_state",
    _SHARDS,
    found=functools.partial(_fsdp_has, f"{_FSDP}.FSDPModule", "_get_fsdp_state"),
    applies=dist.is_available,
    by_doctor=True,
)
_STATE = f"{_FSDP}._fully_shard._fsdp_state.FSDPState"
FSDP_GROUP = key(
    f"{_STATE}._fsdp_param_group",
    _SHARDS,
    found=functools.partial(_fsdp_has, _STATE, "_fsdp_param_group"),
    applies=dist.is_available,
    by_doctor=True,
)

_REDUCTIONS = Feature("how FSDP2 reduces gradients", "sharded gradients are not held against what the ranks put in")
#: The module whose function reduces the gradients of one of the parts that FSDP2 wraps.
FSDP_COLLECTIVES = f"{_FSDP}._fully_shard._fsdp_collectives"
FSDP_REDUCE = key(
    f"{FSDP_COLLECTIVES}.foreach_reduce",
    _REDUCTIONS,
    found=functools.partial(_fsdp_has, FSDP_COLLECTIVES, "foreach_reduce"),
    applies=dist.is_available,
    by_doctor=True,
)
_GATHERS = Feature("how FSDP2 gathers parameters", "what ranks have gathered is not compared")
FSDP_GATHER = key(
    f"{FSDP_COLLECTIVES}.foreach_all_gather_copy_out",
    _GATHERS,
    found=functools.partial(_fsdp_has, FSDP_COLLECTIVES, "foreach_all_gather_copy_out"),
    applies=dist.is_available,
    by_doctor=True,
)

# --- torch.compile ----------------------------------------------------------------------------------------------------

_COMPILE = Feature("torch.compile", "compiled models are taken for others")
#: The module by which it is known that something could have been compiled.
DYNAMO = "torch._dynamo"
_EVAL_FRAME = f"{DYNAMO}.eval_frame"


def _dynamo_has(path: str) -> bool:
    load(path)
    return has(path)


ORIGINAL = key(
    f"{_EVAL_FRAME}.OptimizedModule._orig_mod",
    _COMPILE,
    found=lambda: _dynamo_has(_EVAL_FRAME) and named_in(f"{_EVAL_FRAME}.OptimizedModule.__init__", "_orig_mod"),
    by_doctor=True,
    off="a compiled model is looked at as if it were another one",
)
_EXEC = "torch._C._dynamo.eval_frame"
_EXEC_OFF = "more breaks in what is compiled around our wrappers, and steps inside it are not seen"
set_exec_strategy: Any = thing(f"{_EXEC}.set_code_exec_strategy", _COMPILE, otherwise=None, off=_EXEC_OFF, since=(2, 7))
FrameAction: Any = thing(f"{_EXEC}._FrameAction", _COMPILE, otherwise=None, off=_EXEC_OFF, since=(2, 7))
FrameExecStrategy: Any = thing(f"{_EXEC}._FrameExecStrategy", _COMPILE, otherwise=None, off=_EXEC_OFF, since=(2, 7))
COMPILED_CALL = key(f"{_MODULE}._compiled_call_impl", _COMPILE, off="`model.compile()` is not seen")
compiled_backends: Callable[[], Any] = later(
    f"{_EVAL_FRAME}.cached_backends",
    _COMPILE,
    otherwise=None,
    found=functools.partial(_dynamo_has, f"{_EVAL_FRAME}.cached_backends"),
    by_doctor=True,
    off="hooks that are only looked for in the first steps may be compiled into the graph",
)

# --- data -------------------------------------------------------------------------------------------------------------

_DATA = Feature("iterating over a DataLoader", "batches, and the time that is waited for them, are not seen")
#: What iterating over a DataLoader returns; batches come out of its `__next__`.
LoaderIterator: Any = thing("torch.utils.data.dataloader._BaseDataLoaderIter", _DATA, otherwise=type("Nobody", (), {}))
NEXT_INDICES = key(
    "torch.utils.data.dataloader._BaseDataLoaderIter._next_index",
    _DATA,
    off="what ranks are given for the same index is not compared",
)
NUMBER_OF_SAMPLES = key(
    "torch.utils.data.RandomSampler._num_samples",
    _DATA,
    stored_by="torch.utils.data.RandomSampler.__init__",
    off="of a sampler that draws another number of samples it is not known how many",
)
WORKERS = key(
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._workers",
    _DATA,
    stored_by="torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__init__",
    off="the memory of a loader's workers is not counted",
)

# --- memory of devices ------------------------------------------------------------------------------------------------

_MEMORY = Feature("the memory of devices", "the memory of devices is not measured")
_CUDA_ONLY = "the memory of other devices than CUDA's is not measured"
allocator_is_ready: Callable[[], bool] = thing(
    "torch._C._accelerator_isAllocatorInitialized",
    _MEMORY,
    otherwise=torch.cuda.is_initialized,
    off=_CUDA_ONLY,
    since=(2, 9),
)
device_stats: Any = thing(
    "torch._C._accelerator_getDeviceStats",
    _MEMORY,
    otherwise=torch.cuda.memory_stats_as_nested_dict,
    off=_CUDA_ONLY,
    since=(2, 9),
)
_MEMORY_OFF = "there is no snapshot when CUDA's memory is exhausted"
record_memory_history: Any = thing("torch.cuda.memory._record_memory_history", _MEMORY, otherwise=None, off=_MEMORY_OFF)
memory_snapshot: Any = thing("torch.cuda.memory._snapshot", _MEMORY, otherwise=_none, off=_MEMORY_OFF)
observe_out_of_memory: Any = thing(
    "torch._C._cuda_attach_out_of_memory_observer", _MEMORY, otherwise=None, applies=_cuda, off=_MEMORY_OFF
)


def missing(*, doctor: bool = False) -> list[Name]:
    """Return the names that this torch should have but has not.

    Args:
        doctor: also those whose probe loads or computes something, and those that came with a later torch.
    """
    asked = TABLE if doctor else [name for name in TABLE if not name.by_doctor and not name.is_later()]
    return [name for name in asked if name.is_missing()]


__all__ = ["TABLE", "Feature", "MissingError", "Name", "inherits", "missing", "resolve"]
