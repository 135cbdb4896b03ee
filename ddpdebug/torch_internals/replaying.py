"""What a replay needs of torch: hooks, tables of modules, autograd nodes, versions, dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddpdebug.torch_internals import names
from ddpdebug.torch_internals.names import inherits

#: The parts of a module that running its forward may change, its own attributes aside.
_TABLES = (names.PARAMETERS, names.BUFFERS, names.MODULES, *names.HOOKS, *names.HOOK_MARKS)


def clones(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return detached copies of tensors, made by one launch for all of them."""
    if not tensors:
        return []
    return list(names.foreach_clone([tensor.detach() for tensor in tensors]))


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own table of buffers."""
    table: dict[str, torch.Tensor | None] = getattr(module, names.BUFFERS)
    return table


def own_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return a module's own parameters, those of its children left out; `parameters` may be a method of the user's."""
    return [parameter for parameter in getattr(module, names.PARAMETERS).values() if parameter is not None]


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own buffers by name, those of its children left out."""
    return {name: buffer for name, buffer in getattr(module, names.BUFFERS).items() if buffer is not None}


class OperationMode(names.DispatchMode):  # type: ignore[misc]  # looked up, so that it may be missing
    """A mode that sees every operation, and whose use does not load the compiler (a second, in the middle of a job)."""

    def __init__(self) -> None:
        if names.DispatchMode is object:
            raise names.MissingError("this torch has no TorchDispatchMode: operations are not followed")
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while a mode of ours is on


def is_sink(node: object) -> bool:
    """Tell whether an autograd node is the one that DDP puts behind a model's outputs."""
    return type(node).__name__ == names.SINK


def next_sequence() -> int:
    """Return the number that the next autograd node of this thread will get."""
    return int(names.next_sequence())


def sequence_of(node: Any) -> int:
    """Return the number of an autograd node."""
    return int(names.sequence(node)())


def saved_of(node: Any) -> dict[str, Any]:
    """Return what a node has saved for backward, as far as it is still there."""
    found = {}
    for name in dir(node):
        if name.startswith(names.SAVED):
            try:
                found[name.removeprefix(names.SAVED)] = getattr(node, name)
            except (RuntimeError, AttributeError) as error:
                if type(error) not in {RuntimeError, AttributeError}:
                    raise  # torch says by these that backward has freed it; a class below them is somebody else's
    return {name: value for name, value in found.items() if value is not None}


def module_tables(module: torch.nn.Module) -> dict[str, Any]:
    """Return the dictionaries that make up a module: parameters, buffers, submodules, hooks."""
    return {name: module.__dict__[name] for name in _TABLES if name in module.__dict__}


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether `torch.compile` made this module or its call."""
    return hasattr(module, names.ORIGINAL) or getattr(module, names.COMPILED_CALL, None) is not None


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Tell whether `module.compile()` has compiled the calls of a module."""
    return module.__dict__.get(names.COMPILED_CALL) is not None


def hook_tables(module: torch.nn.Module) -> dict[str, dict[int, Any]]:
    """Return the tables of the hooks that a call of this module runs, by name."""
    return {name: module.__dict__[name] for name in names.HOOKS if module.__dict__.get(name) is not None}


def call_own_hooks_only(module: torch.nn.Module) -> None:
    """Have a copy of a module run with the forward hooks that it has itself, not with those of all modules.

    torch looks the implementation of a call up on the instance, so that nobody else's calls change.
    """
    with_kwargs, always, before_with_kwargs = [module.__dict__.get(name, {}) for name in names.HOOK_MARKS]
    after, before = [module.__dict__.get(name, {}) for name in names.HOOKS[:2]]

    def call(*args: Any, **kwargs: Any) -> Any:
        for key, hook in tuple(before.items()):
            changed: Any = hook(module, args, kwargs) if key in before_with_kwargs else hook(module, args)
            if changed is not None and key in before_with_kwargs:
                args, kwargs = changed
            elif changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        hooks = tuple(after.items())
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
    """Replace what a call of one module runs, hooks included; its class stays what it is."""
    module.__dict__[names.COMPILED_CALL] = None
    module.__dict__[names.CALLS[0]] = call


def calls_plainly(kind: type[torch.nn.Module]) -> bool:
    """Tell whether a call of a class of modules goes through torch's own implementation, which can be replaced."""
    own: Any = torch.nn.Module
    if getattr(kind, names.CALLS[0], None) is not getattr(own, names.CALLS[0], own):
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
    return [hook for name in names.GLOBAL_HOOKS for hook in getattr(owner, name, {}).values()]


def syncs_statistics(module: torch.nn.Module) -> bool:
    """Tell whether a module's forward communicates in training: SyncBatchNorm, over more than one rank."""
    if not inherits(type(module), ("SyncBatchNorm",)) or not dist.is_initialized():
        return False
    group: Any = getattr(module, "process_group", None)
    return dist.get_world_size(group) > 1


def is_parallel(module: torch.nn.Module) -> str | None:
    """Return what a module is whose forward communicates (DDP, FSDP, tensor parallel), None for other modules."""
    kinds = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
    # what operations on these send is done below the mode that would see it
    if any(inherits(type(parameter), ("DTensor",)) for parameter in own_parameters(module)):
        return "module of DTensors"
    return next((name for name in kinds if inherits(type(module), (name,))), None)
