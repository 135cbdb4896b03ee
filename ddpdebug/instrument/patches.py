"""The entry points of torch that are wrapped while a monitor is attached, and what looks at each.

Class-level only: nothing is left on the user's objects, which may be copied, pickled and sent elsewhere. Each wrapper
calls the original exactly once with the same arguments (`probes/entries.py`); under `torch.compile` it steps aside, so
that the compiled graph is the one without ddpdebug.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from ddpdebug import torch_internals as internals
from ddpdebug.forensics.loss.dropout_calls import active_calls
from ddpdebug.forensics.target_leak import Leaks
from ddpdebug.isolation.user_code import is_users, user_location
from ddpdebug.probes.ddp_wrapper import classify_hook
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.loaders import Loaders
from ddpdebug.probes.recorder import Recorder
from ddpdebug.probes.training_loop.schedulers import STEPS
from ddpdebug.probes.training_loop.training_loop import Recipe
from ddpdebug.probes.training_loop.validation_loss import Evaluations


class Patches:
    """Installs the wrappers and takes them away again."""

    def __init__(
        self, recorder: Recorder, loaders: Loaders, on_group: Callable[[], None], validation_loss: str = "modules"
    ) -> None:
        self.recorder, self.loaders, self.on_group = recorder, loaders, on_group
        self.entries = entries_of(recorder.guard)
        self.recipe = Recipe(recorder, loaders.announce, Leaks(partial(setattr, recorder.guard, "quiet")), active_calls)
        self.evaluations = Evaluations(recorder, loaders, self.models, self.recipe.tell, validation_loss)
        self._functions = validation_loss == "functions"
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._kinds: set[type] = set()
        recorder.forget_half += [self.recipe.cut]

    def install(self) -> None:
        """Put every wrapper in place."""
        rec, recipe, here = self.recorder, self.recipe, here_of(self.entries.threads.is_here)
        self.entries.stop = rec.stop_here
        self.entries.on_step(
            before=[
                ("probe:recipe", recipe.before_step),
                ("probe:evaluation", self._end_evaluation),
                ("probe:optimizer", rec.pre_step),
            ],
            after=[
                ("probe:optimizer", rec.post_step),
                ("probe:recipe", recipe.after_step),
                ("probe:evaluation", self.evaluations.begin),
            ],
            who=rec.follows_step,
            why="the step of every optimizer",
        )
        self._install_ddp()
        patch = self.entries.patch
        patch(
            torch.autograd,
            "backward",
            "the loss, the phases of a step",
            before=[
                ("probe:losses", recipe.look_at_loss),
                ("probe:recipe", recipe.begin_backward),
                ("probe:backward", rec.begin_backward),
            ],
            after=[("probe:backward", rec.end_backward), ("probe:recipe", recipe.end_backward)],
            failed=[("probe:memory", _failed(rec)), ("probe:backward", rec.abort_backward)],
            who=rec.follows_backward,
        )
        patch(
            torch.amp.GradScaler,
            "step",
            "skipped steps",
            before=[("probe:scaler", self._scaler_steps)],
            after=[("probe:scaler", self._scaler_stepped)],
            who=here,
        )
        patch(torch.amp.GradScaler, "scale", "the loss scale", after=[("probe:scaler", self._scaled)], who=here)
        patch(torch.amp.GradScaler, "unscale_", "unscaled gradients", after=[("probe:clip", self._unscaled)], who=here)
        patch(torch.nn.utils, "clip_grad_norm_", "clipping", after=[("probe:clip", self._clipped)], who=here)
        patch(torch.nn.utils, "clip_grad_value_", "clipping", after=[("probe:clip", self._clipped_values)], who=here)
        for owner in (torch.nn.Module, torch.optim.Optimizer):
            before = [("probe:last-state", self._pauses)]
            patch(
                owner,
                "load_state_dict",
                "where parameters and state were loaded",
                before=before,
                after=[("probe:load", self._loaded)],
                who=here,
            )
        why = "which modules there are: averages and teachers beside the model, what an optimizer trains"
        self.entries.on_parts("probe:built", self._has_part, why)
        for owner in (torch.nn.Module, torch.optim.Optimizer):
            what = "which modules and optimizers there are, copies too"
            patch(owner, "__setstate__", what, after=[("probe:built", self._state_set)])
        patch(torch.optim.Optimizer, "__init__", "which optimizers there are", after=[("probe:audit", self._built)])
        for kind in STEPS:
            patch(kind, "step", "schedules against steps", before=[("probe:schedules", recipe.scheduled)], who=here)
        patch(
            ReduceLROnPlateau,
            "__init__",
            "schedules against steps",
            after=[("probe:schedules", recipe.scheduler_built)],
            who=here,
        )
        patch(
            dist,
            "all_gather",
            "gathered tensors that need gradients",
            after=[("probe:gather", self._gathered)],
            who=here,
        )
        patch(dist, "init_process_group", "when ranks begin to exist", after=[("exchange", self._initialized)])
        # most scripts do this last, while their models are alive
        patch(
            dist,
            "destroy_process_group",
            "when ranks cease to exist",
            before=[("probe:last-state", self._ends)],
            who=here,
        )
        patch(
            DataLoader,
            "__iter__",
            "samplers",
            before=[("probe:loader", self.loaders.begin)],
            after=[("probe:loader", self._loader_began)],
        )
        patch(
            internals.LoaderIterator,
            "__next__",
            "batches, and the time that is waited for them",
            before=[("probe:loader", self.loaders.waits)],
            after=[("probe:loader", self.loaders.delivered)],
            failed=[("probe:last-state", self._epoch_ends)],
            who=here,
        )
        if self._functions and not internals.anything_compiled():
            what = "the code of the loss functions of torch.nn.functional"
            why = "losses that are computed without gradients; the functions stay the same objects"
            self.entries.code("probe:evaluation", what, internals.look_at_losses, self.evaluations.look, why)
        averagers = sys.modules.get("torch.distributed.algorithms.model_averaging.averagers")
        if averagers is None:
            with contextlib.suppress(ImportError):
                from torch.distributed.algorithms.model_averaging import averagers  # noqa: PLC0415
        if averagers is not None:
            patch(
                averagers.PeriodicModelAverager,
                "average_parameters",
                "replicas that differ on purpose",
                before=[("probe:wrapper", self._averages)],
            )

    def _install_ddp(self) -> None:
        rec, patch = self.recorder, self.entries.patch
        patch(
            DistributedDataParallel,
            "__init__",
            "wrapping",
            before=[("exchange", self._initialized), ("probe:structure", self._wraps)],
            after=[("probe:wrapper", self._wrapped)],
        )
        patch(
            DistributedDataParallel,
            "forward",
            "batches, outputs, phases of a step",
            before=[
                ("probe:evaluation", self.evaluations.forward),
                ("probe:broadcast", self._broadcasts),
                ("probe:forward", self._forward_begins),
                ("probe:recipe-forward", self._recipe_begins),
                ("probe:numerics-forward", self._numerics_begins),
            ],
            after=[
                ("probe:numerics-forward", self._numerics_ends),
                ("probe:forward", self._forward_ends),
                ("probe:recipe-forward", self._recipe_ends),
                ("probe:scene", self._scene_ends),
            ],
            failed=[
                ("probe:numerics-forward", self._numerics_aborts),
                ("probe:recipe-forward", self._recipe_aborts),
                ("probe:forward", self._forward_fails),
                ("probe:memory", _failed(rec)),
            ],
            who=rec.follows_forward,
            stops=True,
        )
        after = [("probe:buffers", self._broadcast_done), ("probe:scene", self._scene_begins)]
        patch(
            DistributedDataParallel,
            internals.PRE_FORWARD,
            "buffers, and inputs for a replay",
            after=after,
            who=here_of(self.entries.threads.is_here),
        )
        patch(
            DistributedDataParallel, "no_sync", "the DDP contract: accumulation", after=[("probe:no-sync", rec.no_sync)]
        )
        patch(
            DistributedDataParallel,
            "register_comm_hook",
            "the DDP contract: how gradients are reduced",
            after=[("probe:comm-hook", self._hooked)],
        )

    def adopt(self, params: list[torch.Tensor]) -> None:
        """Look at the models that hold these parameters, which no DDP does."""
        for module in self.entries.built.roots(params):
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
        if isinstance(module, DistributedDataParallel | torch.jit.ScriptModule) or self.watches(module):
            return
        self._modules = [ref for ref in self._modules if ref() is not None]
        self._modules.append(weakref.ref(module))
        if kind not in self._kinds and not internals.anything_compiled():
            self._kinds.add(kind)
            self.entries.patch(
                kind,
                "forward",
                "inputs and outputs of a model that no DDP wraps, for replays",
                before=[
                    ("probe:evaluation", self.evaluations.train),
                    ("probe:scene", self._module_begins),
                    ("probe:numerics-forward", self._module_numerics),
                ],
                after=[("probe:numerics-forward", self._numerics_ends), ("probe:scene", self._module_ends)],
                failed=[("probe:numerics-forward", self._numerics_aborts)],
                who=self._follows_module,
                always_ask=True,
            )

    def _has_part(self, module: torch.nn.Module, name: str, part: Any) -> None:
        if name == internals.ORIGINAL:  # `torch.compile` makes a wrapper: it would see ours instead of the model's own
            for kind in self._kinds:
                self.entries.unpatch(kind, "forward")
            self._kinds.clear()
            self.evaluations.release()  # torch warns where hooks lie on all modules
        self.entries.built.has_part(module, name, part)

    def remove(self, *, finished: bool = False) -> None:
        """Restore the originals."""
        run = self.recorder.guard.run
        run("close:recipe", self.recipe.close, finished=finished)
        run("close:evaluation", self.evaluations.release)
        self.entries.close()

    # --- DistributedDataParallel --------------------------------------------------------------------------------------

    def _initialized(self, *_: Any, **__: Any) -> None:
        self.on_group()

    def _wraps(self, ddp: DistributedDataParallel, module: Any = None, *_: Any, **kwargs: Any) -> None:
        module = kwargs.get("module", module)
        if isinstance(module, torch.nn.Module) and self.entries.threads.may_build():
            self.recorder.before_wrap(module, kwargs.get("process_group"))

    def _wrapped(self, _: Any, ddp: DistributedDataParallel, *__: Any, **___: Any) -> None:
        if self.entries.threads.may_build():
            self.recorder.wrapped(ddp)

    def _broadcasts(self, ddp: DistributedDataParallel, *_: Any, **__: Any) -> None:
        self.recorder.buffers.before_forward(ddp)

    def _forward_begins(self, ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        self.recorder.begin_forward(ddp, args, kwargs)

    def _recipe_begins(self, ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        self.recipe.forward(ddp, args, kwargs)

    def _numerics_begins(self, ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        self.recorder.begin_numerics(ddp, args, kwargs)

    def _numerics_ends(self, output: Any, *_: Any, **__: Any) -> None:
        self.recorder.numerics.end(output)

    def _numerics_aborts(self, *_: Any, **__: Any) -> None:
        self.recorder.numerics.abort()

    def _forward_ends(self, output: Any, ddp: DistributedDataParallel, *_: Any, **__: Any) -> None:
        self.recorder.end_forward(ddp, output)

    def _forward_fails(self, _: BaseException, ddp: DistributedDataParallel, *__: Any, **___: Any) -> None:
        self.recorder.abort_forward(ddp)

    def _recipe_ends(self, output: Any, ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        self.recipe.output(ddp, args, kwargs, output)

    def _recipe_aborts(self, error: BaseException, *_: Any, **__: Any) -> None:
        self.recipe.abort(error)

    def _scene_begins(self, result: Any, ddp: DistributedDataParallel, *_: Any, **__: Any) -> None:
        module = internals.unwrap_compiled(ddp.module)
        args, kwargs = result
        self.recorder.scenes.begin(module, args, kwargs, self.recorder.next_step())

    def _scene_ends(self, output: Any, ddp: DistributedDataParallel, *_: Any, **__: Any) -> None:
        self.recorder.scenes.end(internals.unwrap_compiled(ddp.module), output)

    def _broadcast_done(self, _: Any, ddp: DistributedDataParallel, *__: Any, **___: Any) -> None:
        self.recorder.buffers.after_broadcast(ddp)

    def _hooked(self, _: Any, ddp: DistributedDataParallel, state: Any, hook: Any) -> None:
        wrapper = self.recorder.wrapped(ddp)
        wrapper.hook_kind = "custom"  # nothing is claimed of its sums if the next line fails
        wrapper.hook, wrapper.hook_kind = classify_hook(state, hook)
        if wrapper.hook_kind in {"known", "half"} and isinstance(state, dist.ProcessGroup):
            wrapper.group = internals.ranks_of(state)  # torch's own hooks reduce over the group that is their state

    def _pauses(self, *_: Any, **__: Any) -> None:
        self.recorder.pause()

    def _epoch_ends(self, error: BaseException, *_: Any, **__: Any) -> None:
        if isinstance(error, StopIteration):
            self.recorder.pause()

    def _ends(self, *_: Any, **__: Any) -> None:
        self.recorder.look_back()

    def _averages(self, *_: Any, **__: Any) -> None:
        self.recorder.averaged = True

    # --- models that no DDP wraps -------------------------------------------------------------------------------------

    def _follows_module(self, module: torch.nn.Module, *_: Any, **__: Any) -> bool:
        return self.entries.threads.is_here() and not self.recorder.numerics.inside and self.watches(module)

    def _module_begins(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        self.recorder.scenes.begin(module, args, kwargs, self.recorder.next_step())

    def _module_numerics(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        self.recorder.numerics.begin(module, "", args, kwargs)

    def _module_ends(self, output: Any, module: torch.nn.Module, *_: Any, **__: Any) -> None:
        self.recorder.scenes.end(module, output)

    # --- what stands between backward and step ------------------------------------------------------------------------

    def _scaler_steps(self, scaler: Any, *_: Any, **__: Any) -> None:
        self._pre_steps = self.recorder.pre_steps
        if scaler.is_enabled():
            self.recipe.scaler_steps()

    def _scaler_stepped(self, _: Any, scaler: Any, optimizer: Any, *__: Any, **___: Any) -> None:
        if self.recorder.pre_steps == self._pre_steps and scaler.is_enabled():
            self.recorder.guard.run("probe:optimizer", self.recorder.skipped, optimizer)
            self.recipe.skipped(optimizer)

    _pre_steps = -1

    def _scaled(self, _: Any, scaler: Any, *__: Any, **___: Any) -> None:
        if not scaler.is_enabled():
            self.recorder.events.note_no_scale()
        elif (value := internals.scale_of(scaler)) is not None:
            self.recorder.events.note_scale(value)

    def _unscaled(self, *_: Any, **__: Any) -> None:
        self.recipe.unscaled()

    def _clipped(self, norm: Any, parameters: Any = None, max_norm: Any = None, *_: Any, **__: Any) -> None:
        del parameters
        self.recorder.events.clipped(norm, float(max_norm), user_location())
        self.recipe.clipped(user_location())

    def _clipped_values(self, *_: Any, **__: Any) -> None:
        self.recipe.clipped(user_location())

    def _loaded(self, _: Any, loaded: Any, *__: Any, **___: Any) -> None:
        self.recorder.events.loaded(type(loaded).__name__, user_location())

    def _gathered(self, _: Any, tensor_list: Any = None, tensor: Any = None, *__: Any, **___: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            self.recorder.events.gathered(tensor_list, tensor, user_location())

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _end_evaluation(self, *_: Any) -> None:
        self.evaluations.end()

    def _state_set(self, _: Any, thing: Any, *__: Any, **___: Any) -> None:
        self.entries.built.note(thing)

    def _built(self, _: Any, optimizer: Any, *__: Any, **___: Any) -> None:
        self.recipe.built(optimizer)

    def _loader_began(self, iterator: Any, *_: Any) -> None:
        self.loaders.began(iterator)


def _failed(recorder: Recorder) -> Callable[..., None]:
    def failed(error: BaseException, *_: Any, **__: Any) -> None:
        if isinstance(error, Exception) and not is_users(error):  # a handler may raise MemoryError
            recorder.memory.failed(error)

    return failed


def here_of(is_here: Callable[[], bool]) -> Callable[..., bool]:
    """Return `is_here` as something that may be called with the arguments of any function."""

    def here(*_: Any, **__: Any) -> bool:
        return is_here()

    return here
