"""The doors through which ddpdebug sees training: wrappers around a few public entry points of torch.

Class-level only: nothing is left on the user's objects, which may be copied, pickled and sent elsewhere. Each wrapper
calls the original exactly once with the same arguments; under `torch.compile` it steps aside, so that the compiled
graph is the one without ddpdebug.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from ddpdebug import torch_internals as internals
from ddpdebug.probes.guard import Guard, user_location
from ddpdebug.probes.hooks import on_gradient
from ddpdebug.probes.loaders import Loaders
from ddpdebug.probes.optimizers import roots
from ddpdebug.probes.recipe import Recipe, patches as recipe_patches
from ddpdebug.probes.recipe.evaluations import Evaluations
from ddpdebug.probes.recorder import Recorder
from ddpdebug.probes.wrappers import classify_hook


class Patches:
    """Installs the wrappers and takes them away again."""

    def __init__(self, recorder: Recorder, loaders: Loaders, on_group: Callable[[], None]) -> None:
        self.recorder, self.loaders, self.on_group = recorder, loaders, on_group
        self.recipe = Recipe(recorder, loaders.announce)
        self.evaluations = Evaluations(recorder, loaders, self.models, self.recipe.tell)
        self._undo: list[Callable[[], None]] = []
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._kinds: set[type] = set()

    def install(self) -> None:
        """Put every wrapper in place."""
        run, rec = self.recorder.guard.run, self.recorder

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                run("probe:recipe", self.recipe.before_step, optimizer, args, kwargs)
                run("probe:evaluation", self.evaluations.end)
                run_step(run, rec, optimizer, args, kwargs)

        def after(optimizer: Any, *_: Any) -> None:
            if not torch.compiler.is_compiling():
                run("probe:optimizer", rec.post_step, optimizer)
                run("probe:recipe", self.recipe.after_step, optimizer)

        for function in (before, after, Guard.run, on_gradient):
            internals.leave_uncompiled(function)
        self._undo += [register_optimizer_step_pre_hook(before).remove, register_optimizer_step_post_hook(after).remove]
        self._wrap(DistributedDataParallel, "__init__", _init)
        self._wrap(DistributedDataParallel, "forward", _forward)
        self._wrap(DistributedDataParallel, internals.PRE_FORWARD, _pre_forward)
        self._wrap(DistributedDataParallel, "no_sync", _no_sync)
        self._wrap(DistributedDataParallel, "register_comm_hook", _register_comm_hook)
        self._wrap(torch.autograd, "backward", _backward)
        self._wrap(torch.amp.GradScaler, "step", _scaler_step)
        self._wrap(torch.amp.GradScaler, "scale", _scaler_scale)
        self._wrap(torch.nn.utils, "clip_grad_norm_", _clip)
        self._wrap(torch.nn.Module, "load_state_dict", _load)
        self._wrap(torch.optim.Optimizer, "load_state_dict", _load)
        self._wrap(dist, "all_gather", _all_gather)
        self._wrap(dist, "init_process_group", _init_process_group)
        self._wrap(dist, "destroy_process_group", _destroy_process_group)
        self._wrap(DataLoader, "__iter__", _loader_iter)
        self._wrap(internals.LoaderIterator, "__next__", _loader_next)
        for owner, name, make in recipe_patches.doors(self.recipe, run):
            self._wrap(owner, name, make)
        if not internals.anything_compiled():
            look = self.evaluations.look
            undo = run("probe:losses", internals.look_at_losses, lambda loss: run("probe:evaluation", look, loss))
            self._undo += [] if undo is None else [undo]
        averagers = sys.modules.get("torch.distributed.algorithms.model_averaging.averagers")
        if averagers is None:
            with contextlib.suppress(ImportError):
                from torch.distributed.algorithms.model_averaging import averagers  # noqa: PLC0415
        if averagers is not None:
            self._wrap(averagers.PeriodicModelAverager, "average_parameters", _average)

    def adopt(self, params: list[torch.Tensor]) -> None:
        """Look at the models that hold these parameters, which no DDP does."""
        for module in roots(params):
            self.watch_module(internals.unwrap_compiled(module))

    def watches(self, module: torch.nn.Module) -> bool:
        """Tell whether the module was given to `watch_module`."""
        return any(ref() is module for ref in self._modules)

    def models(self) -> list[torch.nn.Module]:
        """Return the living models that train, without their wrappers."""
        found = [wrapper.module() for wrapper in self.recorder.wrappers] + [ref() for ref in self._modules]
        return [module for module in found if module is not None]

    def watch_module(self, module: torch.nn.Module) -> None:
        """Look at the training forwards of a module that no DDP wraps, through its class."""
        kind = type(module)
        if not isinstance(module, DistributedDataParallel) and not self.watches(module):
            self._modules.append(weakref.ref(module, self._modules.remove))
            if kind not in self._kinds:
                self._kinds.add(kind)
                self._wrap(kind, "forward", _module_forward)

    def remove(self, *, finished: bool = False) -> None:
        """Restore the originals."""
        self.recorder.guard.run("probe:recipe", lambda: self.recipe.close(finished=finished))
        self.evaluations.release()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _wrap(self, owner: Any, name: str, make: Callable[[Patches, Any], Any]) -> None:
        original, own = getattr(owner, name), name in vars(owner)
        made = make(self, original)
        internals.leave_uncompiled(made, nested=False)
        replacement = functools.wraps(original)(made)
        setattr(owner, name, replacement)

        def undo() -> None:
            if vars(owner).get(name) is replacement if isinstance(owner, type) else getattr(owner, name) is replacement:
                setattr(owner, name, original) if own else delattr(owner, name)

        self._undo.append(undo)


def run_step(run: Any, recorder: Recorder, optimizer: Any, args: Any, kwargs: Any) -> None:
    """Run the pre-step probe; a stop that all ranks take alike is raised outside the guard."""
    run("probe:optimizer", recorder.pre_step, optimizer, args, kwargs)
    recorder.stop_here()


def _init(patches: Patches, original: Any) -> Any:
    def __init__(self: DistributedDataParallel, module: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        run, recorder = patches.recorder.guard.run, patches.recorder
        patches.on_group()
        if isinstance(module, torch.nn.Module):
            run("probe:structure", recorder.before_wrap, module, kwargs.get("process_group"))
        original(self, module, *args, **kwargs)
        run("probe:wrapper", recorder.wrapped, self)

    return __init__


def _forward(patches: Patches, original: Any) -> Any:
    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        run, recorder = patches.recorder.guard.run, patches.recorder
        recorder.stop_here()
        run("probe:broadcast", recorder.buffers.before_forward, self)
        started = run("probe:forward", recorder.begin_forward, self, args, kwargs) or 0.0
        run("probe:recipe", patches.recipe.forward, self, args, kwargs)
        run("probe:numerics", recorder.begin_numerics, self, args, kwargs)
        try:
            output = original(self, *args, **kwargs)
        except BaseException as error:
            run("probe:numerics", recorder.numerics.abort)
            run("probe:recipe", patches.recipe.abort)
            if isinstance(error, Exception):
                run("probe:memory", recorder.memory.failed, error)
            raise
        run("probe:numerics", recorder.numerics.end, output)
        run("probe:forward", recorder.end_forward, self, output, started)
        run("probe:recipe", patches.recipe.output, self, args, kwargs, output)
        run("probe:scene", recorder.scenes.end, internals.unwrap_compiled(self.module), output)
        return output

    return forward


def _module_forward(patches: Patches, original: Any) -> Any:
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        numerics = patches.recorder.numerics
        if torch.compiler.is_compiling() or numerics.inside or not patches.watches(self):
            return original(self, *args, **kwargs)
        run, recorder = patches.recorder.guard.run, patches.recorder
        run("probe:scene", recorder.scenes.begin, self, args, kwargs, recorder.next_step())
        run("probe:numerics", numerics.begin, self, "", args, kwargs)
        try:
            output = original(self, *args, **kwargs)
        except BaseException:
            run("probe:numerics", numerics.abort)
            raise
        run("probe:numerics", numerics.end, output)
        run("probe:scene", recorder.scenes.end, self, output)
        return output

    return forward


def _pre_forward(patches: Patches, original: Any) -> Any:
    def pre_forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            run, recorder = patches.recorder.guard.run, patches.recorder
            run("probe:buffers", recorder.buffers.after_broadcast, self)
            module = internals.unwrap_compiled(self.module)
            run("probe:scene", recorder.scenes.begin, module, *result, recorder.next_step())
        return result

    return pre_forward


def _no_sync(patches: Patches, original: Any) -> Any:
    @contextlib.contextmanager
    def no_sync(self: DistributedDataParallel) -> Iterator[None]:
        depth = patches.recorder.no_sync_depth
        with original(self):
            depth[id(self)] = depth.get(id(self), 0) + 1
            try:
                yield
            finally:
                depth[id(self)] -= 1

    return no_sync


def _register_comm_hook(patches: Patches, original: Any) -> Any:
    def register_comm_hook(self: DistributedDataParallel, state: Any, hook: Any) -> Any:
        result = original(self, state, hook)
        patches.recorder.guard.run("probe:wrapper", note, self, state, hook)
        return result

    def note(ddp: DistributedDataParallel, state: Any, hook: Any) -> None:
        wrapper = patches.recorder.wrapped(ddp)
        wrapper.hook, wrapper.hook_kind = classify_hook(state, hook)
        if wrapper.hook_kind in {"known", "half"} and isinstance(state, dist.ProcessGroup):
            wrapper.group = internals.ranks_of(state)  # torch's own hooks reduce over the group that is their state

    return register_comm_hook


def _backward(patches: Patches, original: Any) -> Any:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(tensors, *args, **kwargs)
        run, recorder = patches.recorder.guard.run, patches.recorder
        run("probe:recipe", patches.recipe.begin_backward, tensors)
        started = run("probe:backward", recorder.begin_backward, tensors) or time.perf_counter()
        try:
            return original(tensors, *args, **kwargs)
        except Exception as error:
            run("probe:memory", recorder.memory.failed, error)
            raise
        finally:
            run("probe:backward", recorder.end_backward, started)
            run("probe:recipe", patches.recipe.end_backward)

    return backward


def _scaler_step(patches: Patches, original: Any) -> Any:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        recorder, recipe = patches.recorder, patches.recipe
        steps = recorder.pre_steps
        if self.is_enabled():
            recorder.guard.run("probe:recipe", recipe.scaler_steps)
        result = original(self, optimizer, *args, **kwargs)
        if recorder.pre_steps == steps and self.is_enabled():
            recorder.guard.run("probe:scaler", recorder.skipped, optimizer)
            recorder.guard.run("probe:recipe", recipe.skipped, optimizer)
        return result

    return step


def _scaler_scale(patches: Patches, original: Any) -> Any:
    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        patches.recorder.guard.run("probe:scaler", note if self.is_enabled() else note_disabled, self)
        return result

    def note_disabled(_: Any) -> None:
        patches.recorder.events.note_no_scale()

    def note(scaler: Any) -> None:
        value = internals.scale_of(scaler)
        if value is not None:
            patches.recorder.events.note_scale(value)

    return scale


def _clip(patches: Patches, original: Any) -> Any:
    def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        result = original(parameters, max_norm, *args, **kwargs)
        if torch.compiler.is_compiling():
            return result
        recorder = patches.recorder
        recorder.guard.run("probe:clip", lambda: recorder.events.clipped(result, float(max_norm), user_location()))
        recorder.guard.run("probe:recipe", lambda: patches.recipe.clipped(user_location()))
        return result

    return clip_grad_norm_


def _load(patches: Patches, original: Any) -> Any:
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = patches.recorder
        recorder.pause()
        result = original(self, *args, **kwargs)
        recorder.guard.run("probe:load", lambda: recorder.events.loaded(type(self).__name__, user_location()))
        return result

    return load_state_dict


def _all_gather(patches: Patches, original: Any) -> Any:
    def all_gather(tensor_list: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor_list, tensor, *args, **kwargs)
        compiling = torch.compiler.is_compiling()
        if not compiling and isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            recorder = patches.recorder
            recorder.guard.run("probe:gather", lambda: recorder.events.gathered(tensor_list, tensor, user_location()))
        return result

    return all_gather


def _init_process_group(patches: Patches, original: Any) -> Any:
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        patches.on_group()
        return result

    return init_process_group


def _destroy_process_group(patches: Patches, original: Any) -> Any:
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        patches.recorder.look_back()  # most scripts do this last, while their models are alive
        return original(*args, **kwargs)

    return destroy_process_group


def _loader_iter(patches: Patches, original: Any) -> Any:
    def __iter__(self: Any) -> Any:  # noqa: N807
        patches.recorder.guard.run("probe:loader", patches.loaders.begin, self)
        iterator = original(self)
        patches.recorder.guard.run("probe:loader", patches.loaders.began, iterator)
        return iterator

    return __iter__


def _loader_next(patches: Patches, original: Any) -> Any:
    def __next__(self: Any) -> Any:  # noqa: N807
        started = time.perf_counter()
        try:
            batch = original(self)
        except StopIteration:
            patches.recorder.pause()  # an epoch is over
            raise
        patches.recorder.guard.run("probe:loader", patches.loaders.delivered, batch, time.perf_counter() - started)
        return batch

    return __next__


def _average(patches: Patches, original: Any) -> Any:
    def average_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
        patches.recorder.averaged = True
        return original(self, *args, **kwargs)

    return average_parameters
