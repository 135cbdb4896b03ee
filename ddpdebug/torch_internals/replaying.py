"""What a replay needs of torch: hooks, tables of modules, autograd nodes, versions, dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ddpdebug.torch_internals.names import inherits

#: The parts of a module that running its forward may change, its own attributes aside.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_MARKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
_GLOBAL_PRE_HOOKS = "_global_backward_pre_hooks"
_TABLES = ("_parameters", "_buffers", "_modules", *_HOOKS, *_HOOK_MARKS)


def clones(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy many small tensors at once."""
    if not tensors:
        return []
    return list(torch._foreach_clone([tensor.detach() for tensor in tensors]))


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own table of buffers."""
    return module._buffers


def own_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return a module's own parameters, those of its children left out; `parameters` may be a method of the user's."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own buffers by name, those of its children left out."""
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None}


class OperationMode(TorchDispatchMode):
    """A mode that sees every operation, and whose use does not load the compiler (a second, in the middle of a job)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while a mode of ours is on


def is_sink(node: object) -> bool:
    """Tell whether an autograd node is the one that DDP puts behind a model's outputs."""
    return type(node).__name__ == "_DDPSinkBackward"


def next_sequence() -> int:
    """Return the number that the next autograd node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def sequence_of(node: Any) -> int:
    """Return the number of an autograd node."""
    return int(node._sequence_nr())


def saved_of(node: Any) -> dict[str, Any]:
    """Return what a node has saved for backward, as far as it is still there."""
    found = {}
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                found[name.removeprefix("_saved_")] = getattr(node, name)
            except (RuntimeError, AttributeError) as error:
                if type(error) not in {RuntimeError, AttributeError}:
                    raise  # torch says by these that backward has freed it; a class below them is somebody else's
    return {name: value for name, value in found.items() if value is not None}


def module_tables(module: torch.nn.Module) -> dict[str, Any]:
    """Return the dictionaries that make up a module: parameters, buffers, submodules, hooks."""
    return {name: module.__dict__[name] for name in _TABLES if name in module.__dict__}


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether `torch.compile` made this module or its call."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def hook_tables(module: torch.nn.Module) -> dict[str, dict[int, Any]]:
    """Return the tables of the hooks that a call of this module runs, by name."""
    return {name: module.__dict__[name] for name in _HOOKS if module.__dict__.get(name) is not None}


def call_own_hooks_only(module: torch.nn.Module) -> None:
    """Have a copy of a module run with the forward hooks that it has itself, not with those of all modules.

    torch looks `_call_impl` up on the instance, so that nobody else's calls change.
    """
    marks = [module.__dict__.get(name, {}) for name in _HOOK_MARKS]
    with_kwargs, always, before_with_kwargs = marks

    def call(*args: Any, **kwargs: Any) -> Any:
        for key, hook in tuple(module._forward_pre_hooks.items()):
            changed: Any = hook(module, args, kwargs) if key in before_with_kwargs else hook(module, args)
            if changed is not None and key in before_with_kwargs:
                args, kwargs = changed
            elif changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        hooks = tuple(module._forward_hooks.items())
        try:
            output = module.forward(*args, **kwargs)
        except Exception:
            for key, hook in hooks:
                if key in always:
                    hook(module, args, None)
            raise
        for key, hook in hooks:
            changed = hook(module, args, kwargs, output) if key in with_kwargs else hook(module, args, output)
            output = output if changed is None else changed
        return output

    replace_call(module, call)


def replace_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Let a call of one module run something else."""
    module.__dict__["_compiled_call_impl"] = None
    module.__dict__["_call_impl"] = call


def calls_plainly(kind: type[torch.nn.Module]) -> bool:
    """Tell whether a call of a class of modules goes through torch's `_call_impl`, which can be replaced."""
    own: Any = torch.nn.Module
    if getattr(kind, "_call_impl", None) is not getattr(own, "_call_impl", own):
        return False
    module = object.__new__(own)
    replace_call(module, lambda: True)
    try:
        return module() is True
    except (AttributeError, TypeError):  # this torch calls in another way
        return False


def global_hooks() -> list[Any]:
    """Return the hooks that are registered for all modules."""
    owner: Any = torch.nn.modules.module
    return [hook for name in (*_GLOBAL_HOOKS, _GLOBAL_PRE_HOOKS) for hook in getattr(owner, name, {}).values()]


def drop_global_hooks(unwanted: Callable[[Any], bool]) -> None:
    """Take those hooks of all modules away that are unwanted."""
    owner: Any = torch.nn.modules.module
    for name in (*_GLOBAL_HOOKS, _GLOBAL_PRE_HOOKS):
        table = getattr(owner, name, {})
        for key in [key for key, hook in table.items() if unwanted(hook)]:
            del table[key]


def syncs_statistics(module: torch.nn.Module) -> bool:
    """Tell whether a module's forward communicates in training: SyncBatchNorm, over more than one rank."""
    if not inherits(type(module), ("SyncBatchNorm",)) or not dist.is_initialized():
        return False
    group: Any = getattr(module, "process_group", None)
    return dist.get_world_size(group) > 1


def is_parallel(module: torch.nn.Module) -> str | None:
    """Return what a module is whose forward communicates (DDP, FSDP, tensor parallel), None for other modules."""
    names = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
    # what operations on these send is done below the mode that would see it
    if any(inherits(type(parameter), ("DTensor",)) for parameter in own_parameters(module)):
        return "module of DTensors"
    return next((name for name in names if inherits(type(module), (name,))), None)
