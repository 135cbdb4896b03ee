"""The torch functions that are wrapped while a monitor is attached, and the event that each wrapper emits.

Functions of torch alone: nothing is left on the user's objects and classes, which may be copied, pickled, scripted and
sent elsewhere. The looks lie in the code of these functions (`probes/entries.py`), which stay the same objects with the
same parameters, and nothing that they call runs a frame deeper; under `torch.compile` they are not there, so that the
compiled graph is the one without ddpdebug. Who hears of an event is said in `probes/training_events.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from types import FrameType, GeneratorType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes import training_events as events
from ddpdebug.probes.entries import Entries, Look, entries_of
from ddpdebug.probes.followed import Followed
from ddpdebug.probes.nonfinite import Numerics
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, Event, Tensors, part_of
from ddpdebug.probes.training_loop.schedulers import STEPS
from ddpdebug.probes.training_loop.validation_loss import Evaluations
from ddpdebug.probes.unwatched_steps import UnwatchedSteps
from ddpdebug.torch_internals.graph import TELLS_HOOKS, saved_hooks

#: Frames of ours and of torch's between a look and the function of torch's that is called.
_FRAMES = 12


def watch_saved_hooks(entries: Entries) -> None:
    """Record where hooks are put on saved tensors: before torch 2.12 a node does not show them."""
    why, part = "hooks of yours on saved tensors, which must not be run by looking at these", "saved hooks"
    contexts, hooks = torch.autograd.graph.saved_tensors_hooks, saved_hooks
    before = len(entries.left_out)
    entries.patch(contexts, "__enter__", why, before=[(part, hooks.entered)], failed=[(part, hooks.left)])
    entries.patch(contexts, "__exit__", why, after=[(part, hooks.left)])
    entries.patch(internals.SavedTensor, "register_hooks", why, before=[(part, hooks.registered)])
    if len(entries.left_out) == before:
        entries.guard.run(part, hooks.begin)


def _no_fields(*_: Any, **__: Any) -> tuple[Any, ...]:
    return ()


class Patches:
    """The wrappers of torch functions: installs and removes them.

    Args:
        on_group: called when a process group may have come into being.
        stop: raises what the user has asked to be raised, at a forward or a step.
        unwatched: sees to the steps that are not watched.
        numerics: tells whether a forward that is looked at is running, so that one inside it is none.
        evaluations: looks at losses in the code of functions, where `functions` asks for that.
    """

    def __init__(  # noqa: PLR0913 - what it depends on
        self,
        bus: Bus,
        state: StepState,
        guard: Guard,
        *,
        on_group: Callable[[], None],
        stop: Callable[[], None],
        unwatched: UnwatchedSteps,
        numerics: Numerics,
        evaluations: Evaluations,
        functions: bool,
    ) -> None:
        self._bus, self._state, self._on_group, self._stop, self._unwatched = bus, state, on_group, stop, unwatched
        self._entries, self._followed = entries_of(guard), Followed(state, guard)
        self._numerics, self._evaluations, self._functions = numerics, evaluations, functions
        self._steps = self._steps_before = 0  # optimizer steps that began; before the scaler's step
        self._fills = False  # the step that runs is none of the training's
        self._reads = False  # checkpoints are looked at
        self._used_up = False  # the generator that is given to a clipping has nothing more to give
        bus.on("probe:optimizer", events.ParametersUnwrapped, self._adopt)
        bus.on("probe:resume", events.OptimizerBuilt, lambda _: self._install_checkpoints())

    def install(self) -> None:
        """Install all wrappers."""
        here, patch = self._followed.here, self._entries.patch
        self._entries.on_step(
            before=[_emits(events.StepBegan, self._step_begins)],
            after=[_emits(events.StepEnded, self._step_ended)],
            who=self._followed.step,
            why="the step of every optimizer",
            stop=self._stop,
            passes=(self._unwatched.step_begins, self._unwatched.step_ended),
        )
        self._install_ddp()
        self._entries.on_models(
            before=[
                self._event(
                    events.ModuleForwardBegan, lambda module, /, *args, **kwargs: (module, args, kwargs), passes=True
                )
            ],
            after=[
                self._event(
                    events.ModuleForwardEnded,
                    lambda output, module, /, *args, **kwargs: (module, Tensors((args, kwargs)), Tensors(output)),
                    passes=True,
                )
            ],
            failed=[self._event(events.ModuleForwardFailed, passes=True)],
            who=self._follows_module,
            stop=self._stop_by_hand,
            passes=self._unwatched.forward,
        )
        if not TELLS_HOOKS:
            watch_saved_hooks(self._entries)
        patch(
            torch.autograd,
            "backward",
            "the loss, the phases of a step",
            before=[_emits(events.BackwardBegan, self._backward_begins)],
            after=[self._event(events.BackwardEnded)],
            failed=[self._event(events.BackwardFailed, lambda error, *_, **__: (error,))],
            who=self._followed.backward,
            passes=self._unwatched.backward,
        )
        patch(
            torch.amp.GradScaler,
            "step",
            "skipped steps",
            before=[_emits(events.ScalerSteps, self._scaler_steps)],
            after=[_emits(events.StepSkipped, self._scaler_stepped)],
            who=here,
        )
        scaled = [_emits(events.LossScaled, self._scaled)]
        leave = self._unwatched.leave
        patch(torch.amp.GradScaler, "scale", "the loss scale", after=scaled, who=here, passes=leave)
        unscaled = [self._event(events.Unscaled)]
        patch(torch.amp.GradScaler, "unscale_", "unscaled gradients", after=unscaled, who=here, passes=leave)
        for name, event, emit in (
            ("clip_grad_norm_", events.Clipped, self._clipped),
            ("clip_grads_with_norm_", events.Clipped, self._clipped_by),
            ("clip_grad_value_", events.ValuesClipped, self._values_clipped),
        ):
            begins = [("probe:clip", self._clips)]
            patch(torch.nn.utils, name, "clipping", before=begins, after=[_emits(event, emit)], who=here, passes=leave)
        for owner in (torch.nn.Module, torch.optim.Optimizer):
            patch(
                owner,
                "load_state_dict",
                "where parameters and state were loaded",
                before=[self._event(events.Paused)],
                after=[_emits(events.Loaded, self._loaded)],
                who=here,
            )
        why = "which modules there are: averages and teachers beside the model, what an optimizer trains"
        self._entries.on_parts("probe:built", self._has_part, why)
        for owner in (torch.nn.Module, torch.optim.Optimizer):
            what = "which modules and optimizers there are, copies too"
            patch(owner, "__setstate__", what, after=[("probe:built", self._state_set)])
        built = [self._event(events.OptimizerBuilt, lambda _, optimizer, *__, **___: (optimizer,))]
        patch(torch.optim.Optimizer, "__init__", "which optimizers there are", after=built)
        what = "schedules against steps"
        for kind in STEPS:
            patch(kind, "step", what, before=[_emits(events.SchedulerStepped, self._scheduler_steps)], who=here)
        built = [self._event(events.SchedulerBuilt, lambda _, scheduler, *__, **___: (scheduler,))]
        patch(ReduceLROnPlateau, "__init__", what, after=built, who=here)
        gathered = [_emits(events.Gathered, self._gathered)]
        patch(dist, "all_gather", "gathered tensors that need gradients", after=gathered, who=here, passes=leave)
        patch(dist, "init_process_group", "when ranks begin to exist", after=[("exchange", self._initialized)])
        ends = [_emits(events.GroupEnds, self._group_ends)]
        patch(dist, "destroy_process_group", "when ranks cease to exist", before=ends, who=here)
        made = [self._event(events.SubsetMade, lambda _, subset, *__, **___: (subset, user_location()))]
        patch(Subset, "__init__", "where splits are made", after=made, who=here)
        patch(
            DataLoader,
            "__iter__",
            "samplers",
            before=[self._event(events.EpochBegan, lambda loader: (loader,))],
            after=[self._event(events.WorkersBegan, lambda iterator, *_: (iterator,))],
        )
        patch(
            internals.LoaderIterator,
            "__next__",
            "batches, and the time that is waited for them",
            before=[self._event(events.BatchAwaited)],
            after=[self._event(events.BatchDelivered, lambda batch, iterator, *_: (batch, iterator))],
            failed=[_emits(events.EpochEnded, self._epoch_over), _emits(events.Paused, self._epoch_ends)],
            who=here,
        )
        drawn = [self._event(events.IndicesDrawn, lambda indices, iterator, *_: (iterator, indices))]
        patch(
            internals.LoaderIterator, internals.NEXT_INDICES, "which items batches are made of", after=drawn, who=here
        )
        if self._functions and not internals.anything_compiled():
            what = "the code of the loss functions of torch.nn.functional"
            why = "losses that are computed without gradients; the functions stay the same objects"
            self._entries.code("probe:evaluation", what, internals.look_at_losses, self._evaluations.look, why)
        averagers = sys.modules.get("torch.distributed.algorithms.model_averaging.averagers")
        if averagers is None:
            with contextlib.suppress(ImportError):
                from torch.distributed.algorithms.model_averaging import averagers  # noqa: PLC0415
        if averagers is not None:
            patch(
                averagers.PeriodicModelAverager,
                "average_parameters",
                "replicas that differ on purpose",
                before=[self._event(events.Averaged)],
            )

    def _install_ddp(self) -> None:
        patch = self._entries.patch
        patch(
            DistributedDataParallel,
            "__init__",
            "wrapping",
            before=[("exchange", self._initialized), _emits(events.DDPBuilds, self._wraps)],
            after=[self._event(events.DDPBuilt, lambda _, ddp, *__, **___: (ddp,))],
        )
        patch(
            DistributedDataParallel,
            "forward",
            "batches, outputs, phases of a step",
            before=[
                self._event(
                    events.ForwardBegan,
                    lambda ddp, /, *args, **kwargs: (ddp, args, kwargs, Tensors((args, kwargs))),
                    passes=True,
                )
            ],
            after=[
                self._event(
                    events.ForwardEnded,
                    lambda output, ddp, /, *args, **kwargs: (ddp, Tensors((args, kwargs)), Tensors(output)),
                    passes=True,
                )
            ],
            failed=[self._event(events.ForwardFailed, lambda error, ddp, /, *_, **__: (ddp, error), passes=True)],
            who=self._followed.forward,
            stop=self._stop,
            passes=self._unwatched.ddp_forward,
        )
        patch(
            DistributedDataParallel,
            internals.PRE_FORWARD,
            "buffers, and inputs for a replay",
            after=[self._event(events.ForwardPrepared, lambda result, ddp, /, *_, **__: (ddp, *result), passes=True)],
            who=self._followed.here,
            passes=self._unwatched.prepared,
        )
        patch(
            DistributedDataParallel,
            "no_sync",
            "the DDP contract: accumulation",
            after=[self._event(events.NoSyncEntered, lambda context, ddp: (context, ddp))],
            passes=self._unwatched.leave,
        )
        patch(
            DistributedDataParallel,
            "register_comm_hook",
            "the DDP contract: how gradients are reduced",
            after=[self._event(events.HookRegistered, lambda _, ddp, state, hook: (ddp, state, hook))],
        )

    def _event(
        self, kind: type[Event], fields: Callable[..., tuple[Any, ...]] = _no_fields, *, passes: bool = False
    ) -> Look:
        """Return the look of a wrapper that emits an event with those fields that `fields` makes of its arguments.

        Args:
            passes: it comes in unwatched steps as well, for some parts.
        """

        def emit(*args: Any, **kwargs: Any) -> None:
            self._bus.emit(kind(*fields(*args, **kwargs)), self._unwatched.only if passes else None)

        return _emits(kind, emit)

    def watch_module(self, module: torch.nn.Module) -> None:
        """Observe the training forwards of a module without a DDP."""
        if isinstance(module, DistributedDataParallel | torch.jit.ScriptModule) or self._state.follows(module):
            return
        self._state.follow(module)
        if not internals.anything_compiled():
            self._entries.calls.follow(module)

    def _stop_by_hand(self) -> None:
        if self._state.by_hand:
            self._stop()

    def _adopt(self, event: events.ParametersUnwrapped) -> None:
        for module in self._entries.built.roots(event.params):
            self.watch_module(internals.unwrap_compiled(module))

    def _has_part(self, module: torch.nn.Module, name: str, part: Any) -> None:
        if name == internals.ORIGINAL:  # `torch.compile` makes a wrapper: from here on models run as graphs
            self._entries.calls.unfollow()
            self._evaluations.release()
        self._entries.built.has_part(module, name, part)

    def remove(self) -> None:
        """Remove all wrappers."""
        saved_hooks.end()
        self._entries.close()

    # --- DistributedDataParallel --------------------------------------------------------------------------------------

    def _initialized(self, *_: Any, **__: Any) -> None:
        self._on_group()
        self._install_checkpoints()

    def _install_checkpoints(self) -> None:
        """Look at what is read of distributed checkpoints, once something has loaded their module."""
        planner = sys.modules.get("torch.distributed.checkpoint.default_planner")
        if planner is not None and not self._reads:
            self._reads = True
            read = [_emits(events.CheckpointRead, self._read)]
            what = "what a distributed checkpoint has, and what of it is wanted"
            self._entries.patch(planner, "create_default_local_load_plan", what, after=read, who=self._followed.here)

    def _read(self, _: Any, state_dict: Any, metadata: Any, *__: Any, **___: Any) -> None:
        wanted, stored = {*map(str, state_dict)}, {*map(str, metadata.state_dict_metadata)}
        self._bus.emit(events.CheckpointRead(wanted, stored, user_location()))

    def _wraps(self, ddp: DistributedDataParallel, module: Any = None, *_: Any, **kwargs: Any) -> None:
        del ddp
        module = kwargs.get("module", module)
        if isinstance(module, torch.nn.Module):
            self._bus.emit(events.DDPBuilds(module, kwargs.get("process_group")))

    # --- models that no DDP wraps -------------------------------------------------------------------------------------

    def _follows_module(self, module: torch.nn.Module, /, *_: Any, **__: Any) -> bool:
        if not self._followed.here() or self._numerics.inside or not self._state.follows(module):
            return False
        return not internals.is_compiled_in_place(module)

    # --- backward and step --------------------------------------------------------------------------------------------

    def _backward_begins(self, tensors: Any = None, *_: Any, **__: Any) -> None:
        kind: Any = next(iter([kind for kind in (list, tuple) if issubclass(type(tensors), kind)]), None)
        given = (tensors,) if kind is None else kind.__iter__(tensors)  # an iterator is torch's to use up
        self._bus.emit(events.BackwardBegan([one for one in given if is_a(one, torch.Tensor)]))

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._fills = self._followed.fills_state(optimizer)
        if self._fills:
            return
        self._steps += 1
        closure = any(map(callable, args)) or callable(kwargs.get("closure"))  # torch passes itself among `args`
        self._bus.emit(events.StepBegan(optimizer, closure))

    def _step_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._fills:
            self._bus.emit(events.StepEnded(optimizer))
        self._fills = False

    def _scaler_steps(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        self._steps_before = self._steps + self._unwatched.begun
        if internals.is_scaling(scaler):
            self._bus.emit(events.ScalerSteps(scaler, optimizer))

    def _scaler_stepped(self, _: Any, scaler: Any, optimizer: Any, *__: Any, **___: Any) -> None:
        if self._steps + self._unwatched.begun == self._steps_before and internals.is_scaling(scaler):
            self._unwatched.wake()
            self._bus.emit(events.StepSkipped(optimizer))

    def _scaled(self, _: Any, scaler: Any, *__: Any, **___: Any) -> None:
        if not internals.is_scaling(scaler):
            self._bus.emit(events.LossScaled(None))
        elif (scale := internals.scale_of(scaler)) is not None:
            self._bus.emit(events.LossScaled(scale))

    def _clips(self, parameters: Any = None, *_: Any, **__: Any) -> None:
        if type(parameters) is GeneratorType:  # torch makes a list of it for the functions inside
            self._used_up = parameters.gi_frame is None

    def _clipped(
        self, norm: Any, parameters: Any = None, max_norm: Any = None, norm_type: Any = 2.0, *_: Any, **__: Any
    ) -> None:
        given = _given(parameters)
        used_up = type(parameters) is GeneratorType and self._used_up
        nothing = _is_nothing(norm) or used_up if type(parameters) in _GIVES_ONCE else _lacks_gradients(given)
        self._bus.emit(events.Clipped(norm, float(max_norm), user_location(), given, float(norm_type), nothing))

    def _clipped_by(
        self, _: Any, parameters: Any = None, max_norm: Any = None, total_norm: Any = None, *__: Any, **___: Any
    ) -> None:
        if is_a(total_norm, torch.Tensor) and not _is_within("clip_grad_norm_", "torch.nn.utils.clip_grad"):
            given = _given(parameters)
            nothing = _lacks_gradients(given)
            self._bus.emit(events.Clipped(total_norm, float(max_norm), user_location(), given, nothing=nothing))

    def _values_clipped(self, *_: Any, **__: Any) -> None:
        self._bus.emit(events.ValuesClipped(user_location()))

    def _gathered(self, _: Any, tensor_list: Any = None, tensor: Any = None, *__: Any, **___: Any) -> None:
        if is_a(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            self._bus.emit(events.Gathered(tensor_list, tensor, user_location()))

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _state_set(self, _: Any, thing: Any, *__: Any, **___: Any) -> None:
        self._entries.built.note(thing)

    def _scheduler_steps(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        given = [one for one in (*args, *kwargs.values()) if one is not None]
        measure = next(iter([float(one) for one in given if type(one) in {int, float}]), None)
        self._bus.emit(events.SchedulerStepped(scheduler, absolute=bool(given), measure=measure))

    def _epoch_over(self, error: BaseException, iterator: Any, *_: Any, **__: Any) -> None:
        self._bus.emit(events.EpochEnded(iterator, failed=not isinstance(error, StopIteration)))

    def _epoch_ends(self, error: BaseException, *_: Any, **__: Any) -> None:
        if isinstance(error, StopIteration):
            self._bus.emit(events.Paused())

    def _loaded(  # the arguments of a model's, of which an optimizer's has the first
        self, result: Any, loaded: Any, state_dict: Any = None, strict: Any = None, assign: Any = None, *_: Any
    ) -> None:
        del strict
        given = None if assign else state_dict
        self._bus.emit(events.Loaded(type(loaded).__name__, user_location(), loaded, result, given))

    def _group_ends(self, group: Any = None) -> None:
        self._bus.emit(events.GroupEnds(last=group is None or group is dist.group.WORLD))


def _lacks_gradients(given: Sequence[torch.Tensor] | None) -> bool:
    return given is not None and all([p.grad is None for p in given])


def _is_nothing(norm: Any) -> bool:
    """Return whether a norm is 0, where it is at hand: torch returns one in host memory where there is no gradient."""
    return internals.is_plain(norm) and norm.device.type == "cpu" and not float(norm)


def _is_within(function: str, module: str) -> bool:
    """Return whether a function of a module has called what was called just now."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to walk the stack cheaply
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


#: What gives its items once: passed to an optimizer before, it has none left to clip.
_GIVES_ONCE = frozenset({GeneratorType, filter, map, itertools.chain, itertools.islice, type(iter([]))})


def _given(parameters: Any) -> Sequence[torch.Tensor] | None:
    return parameters if type(parameters) in {list, tuple} else None


def _emits(kind: type[Event], emit: Callable[..., None]) -> Look:
    """Return the look of a wrapper that makes an event of a kind."""
    return part_of(kind), emit
