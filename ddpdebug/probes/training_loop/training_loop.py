"""The training loop's use of its parts: modes, clearing, scheduling, clipping, losses, ownership of parameters.

Runs on the training thread and inside the guard. What a step shows goes into the row's flags and the `recipe`
detail, what is seen once is announced; the rules judge.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddpdebug import torch_internals as internals
from ddpdebug.errors import text_of
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import user_frame, user_location
from ddpdebug.isolation.weak_table import WeakTable
from ddpdebug.probes import training_events as events
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.forward_capture import ForwardCapture, ForwardCaptures
from ddpdebug.probes.loaders import Loaders
from ddpdebug.probes.loop_calls import LoopCalls, Losses
from ddpdebug.probes.loss_line import expression
from ddpdebug.probes.models import Models
from ddpdebug.probes.plain_models import PlainModel, PlainModels
from ddpdebug.probes.record import Part, StepRecord
from ddpdebug.probes.shard_reductions import ShardSums
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, Tensors
from ddpdebug.probes.training_loop.attention_masks import added_masks
from ddpdebug.probes.training_loop.beside import Beside
from ddpdebug.probes.training_loop.detached_parts import Cuts
from ddpdebug.probes.training_loop.dimensions import mixed_up
from ddpdebug.probes.training_loop.eval_dropout import Chance, DropoutCalls
from ddpdebug.probes.training_loop.frozen_moves import FrozenMoves
from ddpdebug.probes.training_loop.growing_hooks import GrowingHooks
from ddpdebug.probes.training_loop.input_statistics import Inputs
from ddpdebug.probes.training_loop.labels import Labels
from ddpdebug.probes.training_loop.loss_graph import (
    Fact,
    Term,
    facts,
    gist,
    is_multiplied,
    is_scaled_in_part,
    made_of_softmax,
    softmax_of_one,
    target_of,
    terms,
)
from ddpdebug.probes.training_loop.loss_scale import LossScale, Reduced
from ddpdebug.probes.training_loop.loss_settings import Settings
from ddpdebug.probes.training_loop.modes import EVALUATION, OF_OTHER_DATA, Modes, has_input_with_gradient
from ddpdebug.probes.training_loop.no_grad import LAST, NoGrad
from ddpdebug.probes.training_loop.parameter_ownership import FIRST, Audit, held_by, unregistered
from ddpdebug.probes.training_loop.put_in import PutIn
from ddpdebug.probes.training_loop.repeated_numbers import Epochs
from ddpdebug.probes.training_loop.resume import Resume
from ddpdebug.probes.training_loop.rollouts import Rollouts, with_rows
from ddpdebug.probes.training_loop.samples import Axes, Views
from ddpdebug.probes.training_loop.schedulers import Schedules
from ddpdebug.probes.training_loop.targets import Targets
from ddpdebug.probes.training_loop.zero_grad import Clearing, evaluations
from ddpdebug.probes.values import loss_reader
from ddpdebug.schema.announcements import (
    Announce,
    Announcement,
    BrokenTies,
    DropoutCall,
    EvaluationInputs,
    InputStatistics,
    MovedParameters,
    TrainModeValidation,
    UnregisteredParameters,
)
from ddpdebug.schema.details import (
    CarriedGradients,
    DiscardedGradients,
    EvalForwards,
    ScaledClip,
    SteppedTwice,
)
from ddpdebug.schema.row import Flag
from ddpdebug.torch_internals.graph import saved_tensor

#: Of each line that calls backward so many passes are looked at in any case.
_FIRST_PASSES = 16
_MAX_FACTS = 3
#: Forwards of a model behind which its inputs are looked at again.
_AGAIN = frozenset({32, 64, 128, 256, 512, 1024, 2048})
#: Evaluations that are further apart than this are told alike.
_MAX_SINCE = 32
#: Different facts of each kind: about losses, other lines, and what is new at one.
_MAX_DIFFERENT = 32
_MAX_NAMES = 20
#: After so many steps of the first optimizer parameters without a gradient are looked after.
_CUTS = 2
_MAX_OPTIMIZERS = 16
#: After so many steps without one of the first optimizer another one begins a stage of training: those that take turns
#: are not left out for so long. Stages that are looked at.
_APART, _MAX_STAGES = 16, 8
#: What DDP's reducer raises at the forward after a step in which some gradient never came.
_UNREDUCED = "Expected to have finished reduction"


@dataclass(slots=True)
class RecipeNotes(Part, key="probe:recipe"):
    """The notes of a step about the use of the loop's parts."""

    flags: int = 0
    recipe: dict[str, Any] = field(default_factory=dict)  # fields of `details.Recipe`, as they become known

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return the flags."""
        return {"flags": self.flags}


@dataclass(slots=True)
class _Loop:
    """What the loop has done since the last optimizer step."""

    trained: int = 0  # forwards with gradients
    eval_modules: list[str] = field(default_factory=list)
    eval_part: str | None = None  # that holds all of these, where the model is in train mode
    in_eval: int = 0  # forwards, of these, with the model or a part in eval mode
    mode_flags: int = 0  # what these say of the modules
    location: str | None = None
    input_gradient: bool = False
    rows: set[int] = field(default_factory=set)  # of what the newest forward was given: its samples, most likely
    elements: int = 0  # that the largest forward was given
    given: set[int] = field(default_factory=set)  # where that is in memory
    lines: list[str | None] = field(default_factory=list)  # that called backward
    losses: LossScale = field(default_factory=LossScale)
    scale: float | None = None  # that the gradients carry
    recomputed: bool = False  # by a backward, with other random numbers
    shapes: list[torch.Size] = field(default_factory=list)  # of what the newest forward was given
    attacks: list[torch.Size] | None = None  # ... before the first backward, if an input wants a gradient
    float16: bool = False  # a forward that trains ran under autocast to it
    scaled: set[str | None] = field(default_factory=set)  # lines whose loss was, by whomever
    in_part: bool = False  # a part of a loss, or one of several, has no loss scale
    clip: str | None = None  # the line that clipped scaled gradients
    touched: bool = False  # gradients were clipped or unscaled
    clipped: set[int] | None = field(default_factory=set)  # parameters, by id; None: not known
    clip_line: str | None = None
    clips: dict[str, int] = field(default_factory=dict)  # by line, after how many backwards it clipped last
    early: str | None = None  # the line that clipped before a backward, and again after it
    idle: str | None = None  # the line that clipped after a step
    clipped_nothing: ScaledClip | None = None  # ... where a backward came next; or what has no gradients
    scales: dict[str | None, float] = field(default_factory=dict)  # by the line that called backward
    new_epoch: bool = False  # a loader has begun one


@dataclass(slots=True)
class _Evaluation:
    """The forwards without gradients, in train mode, since the last one with gradients."""

    forwards: int = 0
    elsewhere: int = 0  # of these, while a loader over other data than those that are trained on was the newest
    location: str | None = None
    since: int = 0  # the step after the evaluation before


@dataclass(slots=True)
class _Stage:
    """The optimizer that is followed, and what it trains: another one may train on."""

    optimizer: weakref.ref[torch.optim.Optimizer] | None = None
    apart: int = 0  # steps of others since its last one
    number: int = 0
    begins: bool = False  # its first forward is to be looked at
    known: WeakTable[None] = field(default_factory=WeakTable)  # this one and those before
    params: set[int] = field(default_factory=set)


class LeakSearch(Protocol):
    """The test whether a language model sees the token that it must predict; see `forensics/target_leak.py`."""

    def loss(
        self,
        capture: ForwardCapture,
        target: torch.Tensor | None,
        ignored: int,
        reader: Callable[[], Callable[[], float]],
    ) -> None:
        """Take a loss with its forward and its target."""

    def work(self, step: int) -> None:
        """Continue the test; its result is announced."""

    def drop(self) -> None:
        """Release all kept objects."""


class MixingSearch(Protocol):
    """The test whether outputs for a sample follow the others of its batch; see `forensics/sample_mixing.py`."""

    def loss(self, capture: ForwardCapture, loaded: int | None) -> None:
        """Take the forward of a step's loss, and the size of the newest loader's batches."""

    def work(self, step: int) -> None:
        """Continue the test; its result is announced."""

    def drop(self) -> None:
        """Release all kept objects."""


def _none(module: torch.nn.Module) -> tuple[Sequence[DropoutCall], bool]:
    del module
    return (), False


class Recipe:
    """The probe of one process's training loop.

    Args:
        models: finds the DDPs.
        calls: knows the loss scale.
        loaders: know which data set is read.
        captures: keeps the forwards for `leaks`.
        announce: tells all ranks.
        leaks: asks whether a language model sees its targets; None does not ask.
        mixing: asks whether samples of a batch depend on each other; None does not ask.
        dropout_calls: reads the calls of dropout functions from a module's source.
    """

    def __init__(  # noqa: PLR0913, PLR0915 - what it depends on
        self,
        bus: Bus,
        state: StepState,
        guard: Guard,
        *,
        models: Models,
        calls: LoopCalls,
        loaders: Loaders,
        captures: ForwardCaptures,
        announce: Announce,
        leaks: LeakSearch | None = None,
        mixing: MixingSearch | None = None,
        dropout_calls: DropoutCalls = _none,
    ) -> None:
        self._state, self._guard, self._models, self._calls, self._captures = state, guard, models, calls, captures
        self._loaders, self._trained_on = loaders, loaders.samples  # the number of samples that are trained on
        self._entries, self._announce, self._pid = entries_of(guard), announce, os.getpid()
        self._run, self._threads = guard.run, self._entries.threads
        self.audit = Audit(self._entries.built)
        self.clearing = Clearing(self._threads.alone, state.is_given_up)
        self.schedules = Schedules(self._entries)
        self._resume = Resume(
            lambda fact: self.tell(fact, (fact.kind, fact.class_name)),
            self.schedules,
            self._entries.built.outermost,
            self.clearing.writes,
        )
        self._beside = Beside(self._entries, self._roots, lambda fact: self.tell(fact, (fact.beside, fact.names)))
        self._modes, self._labels, self._chance = Modes(), Labels(), Chance(self._entries, dropout_calls)
        self._targets, self._moves, self._epochs, self._put_in = Targets(), FrozenMoves(), Epochs(), PutIn()
        self._settings, self._hooks = Settings(), GrowingHooks()
        self._views, self._axes = Views(), Axes(self._entries)
        self._leaks, self._mixing, self._loop = leaks, mixing, _Loop()
        self._trials = [trial for trial in (leaks, mixing) if trial is not None]
        self._passes: dict[str | None, int] = {}
        self._told: dict[type[Announcement], dict[Hashable, int]] = {}
        self._known: dict[type[Announcement], set[Hashable]] = {}  # what was told once
        self._inputs: dict[int, Inputs] = {}
        self._inputs_told: dict[int, InputStatistics] = {}
        self._evaluated_inputs: dict[int, Inputs] = {}  # of evaluations, once those of training were told
        self._elements = 0  # of the largest forward for the step before
        self._cuts: dict[int, Cuts] = {}
        self._no_grad: dict[int, NoGrad] = {}
        self._plain = PlainModels(state)
        self._forwards: dict[int, int] = {}  # of each model, with gradients
        self._stepping: list[int] = []
        self._closure: weakref.ref[torch.optim.Optimizer] | None = None  # whose step calls one now
        self._given: tuple[Flag, tuple[str, ...]] = Flag(0), ()  # what was noted of the gradients before it
        self._evaluated: int | None = None  # how often it has done so by the last backward of this step
        self._last: tuple[weakref.ref[torch.optim.Optimizer], int] | None = None  # who stepped, after how many passes
        self._backwards, self._reconstructs = 0, False  # the latter: a loss compared with what the model was given
        self._steps, self._stage = 0, _Stage()  # steps of the optimizer that is followed
        self._evaluation, self._rollouts = _Evaluation(), Rollouts()
        guard.when_cut(self.cut)
        guard.when_off("probe:recipe", self._forget_loop)
        guard.when_off("probe:recipe-forward", self._forget_forwards)
        guard.needs("probe:clearing", "probe:recipe")  # which backward and step a gradient was seen in
        guard.needs("probe:labels", "probe:losses")
        guard.needs("probe:leaks", "probe:losses")
        bus.on("probe:recipe-forward", events.ForwardBegan, self._forward)
        bus.on("probe:recipe-forward", events.ForwardEnded, self._output)
        bus.on("probe:recipe-forward", events.ForwardFailed, self._fails)
        bus.on("probe:recipe-forward", events.ModuleForwardBegan, self._module_forward)
        bus.on("probe:recipe-forward", events.ModuleForwardEnded, self._module_output)
        bus.on("probe:recipe-forward", events.EvaluationForwardBegan, self._around)
        bus.on("probe:recipe-forward", events.EvaluationForwardEnded, self._around_ends)
        bus.on("probe:recipe-forward", events.ModuleForwardFailed, lambda _: self.abort())
        bus.on("probe:losses", events.BackwardBegan, self._look_at_loss)
        bus.on("probe:losses", events.StepClosing, self._loss_shares)
        bus.on("probe:recipe", events.BackwardBegan, self._begin_backward)
        bus.on("probe:recipe", events.BackwardEnded, self._end_backward)
        bus.on("probe:recipe", events.EpochBegan, self._epoch_begins)
        bus.on("probe:clip", events.Clipped, self._clipped)
        bus.on("probe:clip", events.ValuesClipped, self._clipped)
        bus.on("probe:clip", events.Unscaled, lambda _: self._unscaled())
        bus.on("probe:scaler", events.ScalerSteps, self._scaler_steps)
        bus.on("probe:recipe", events.StepBegan, self._before_step)
        bus.on("probe:recipe", events.StepEnded, self._after_step)
        bus.on("probe:scaler", events.StepSkipped, self._skipped)
        bus.on("probe:moves", events.StepOpened, self._moves.before)
        bus.on("probe:moves", events.StepClosing, self._moved)
        bus.on("probe:schedules", events.StepPassed, self._passed)
        bus.on("probe:clearing", events.Woken, self._woken)
        bus.on("probe:audit", events.OptimizerBuilt, self._built)
        bus.on("probe:schedules", events.SchedulerBuilt, self.scheduler_built)
        bus.on("probe:schedules", events.SchedulerStepped, self.scheduled)
        bus.on("probe:resume", events.EpochBegan, self._resume.epoch_begins)
        bus.on("probe:resume", events.Loaded, self._resume.loaded)
        bus.on("probe:resume", events.CheckpointRead, self._resume.read)
        bus.on("probe:moves", events.Loaded, lambda _: self._put_in.forget())
        bus.on("probe:moves", events.Woken, lambda _: self._put_in.forget())
        bus.on("probe:resume", events.ScalerSteps, self._resume.scaler_steps)

    def _forget_loop(self) -> None:
        """Keep nothing of a step that has no end any more."""
        self._loop = _Loop()
        self._stepping.clear()
        self._closure = None

    def _forget_forwards(self) -> None:
        self.abort()
        self._loop.trained = self._loop.in_eval = 0

    def _built(self, event: events.OptimizerBuilt) -> None:
        """Note a new optimizer; one for each parameter (optimizers that step inside backward) are not followed."""
        self.audit.built(event.optimizer)
        self._epochs.forget()
        if self.clearing.number() < _MAX_OPTIMIZERS:
            self._run("probe:clearing", self.clearing.of, event.optimizer)

    def scheduled(self, event: events.SchedulerStepped) -> None:
        """Record a call of a scheduler's `step`; a call with an epoch is absolute: repeating it changes nothing."""
        if event.absolute:
            self.schedules.moved(event.scheduler, event.measure)
        else:
            self.schedules.called(event.scheduler)

    def scheduler_built(self, event: events.SchedulerBuilt) -> None:
        """Record a scheduler whose constructor does not call its `step`."""
        self.schedules.built(event.scheduler)

    # --- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, event: events.ForwardBegan) -> None:
        """Look at a DDP forward that begins."""
        wrapper = self._models.wrapped(event.ddp)
        self._begins(internals.unwrap_compiled(event.ddp.module), wrapper.index, event.tensors)

    def _module_forward(self, event: events.ModuleForwardBegan) -> None:
        """Look at the forward of a model that no DDP wraps: in one process, where it is what trains."""
        if (index := self._plain.index(event.module)) is not None:
            self._begins(event.module, index, Tensors((event.args, event.kwargs)))

    def _around(self, event: events.EvaluationForwardBegan) -> None:
        """Look at an evaluation around the wrapper as at one of it."""
        if (index := self._index(event.module)) is not None:
            self._begins(event.module, index, event.tensors)

    def _around_ends(self, event: events.EvaluationForwardEnded) -> None:
        if (index := self._index(event.module)) is not None:
            self._ends(event.module, index, event)

    def _index(self, module: torch.nn.Module) -> int | None:
        return next(iter([w.index for w in self._state.wrappers if w.module() is module]), None)

    def _trained(self) -> Sequence[Wrapper | PlainModel]:
        """Return the models that train: those that DDPs wrap, or in one process those that none does."""
        return self._state.wrappers or self._plain.living()

    def _trains(self) -> torch.nn.Module | None:
        return next(iter(self._roots()), None)

    def _roots(self) -> list[torch.nn.Module]:
        return [module for model in self._trained() if (module := model.module()) is not None]

    def _begins(self, root: torch.nn.Module, key: int, tensors: Tensors) -> None:
        self._stepping.clear()
        run = self._run
        if not internals.in_train_mode(root):
            run("probe:chance", self._chance.begin, root)
        if not torch.is_grad_enabled():
            self._begins_without_gradients(root, key, tensors)
            return
        self._beside.trains()
        if left := run("probe:moves", self._put_in.trains, self._roots(), self._state.next_step()):
            self.tell(left)
        self._end_evaluation(tensors)
        if not self._rollouts.has_batch:
            run("probe:rollouts", self._rollouts.trains, tensors())
        run("probe:epochs", self._epochs.forward, root)
        loop = self._loop
        loop.trained += 1
        kind = "cuda" if torch.cuda.is_initialized() else "cpu"
        loop.float16 |= torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        modes = run("probe:modes", self._modes.in_eval, root)
        if modes is not None:
            loop.in_eval += 1
            if modes.names:
                loop.eval_modules, loop.eval_part, loop.location = modes.names, modes.part, user_location()
            if modes.mixed or not modes.names:
                loop.mode_flags |= Flag.MODES_MIXED if modes.mixed else Flag.MODE_CHANGES_NOTHING
        loop.input_gradient |= has_input_with_gradient(tensors())
        rows = list(with_rows(tensors()))
        loop.rows, loop.given = {tensor.shape[0] for tensor in rows}, {tensor.data_ptr() for tensor in rows}
        loop.shapes = [tensor.shape for tensor in rows]
        loop.elements = max(loop.elements, sum(tensor.numel() for tensor in rows))
        self._forwards[key] = self._forwards.get(key, 0) + 1
        self._look_at_inputs(root, key, tensors)
        if key in self._cuts:
            run("probe:cuts", self._cuts[key].begin, list(tensors()))
        if self._forwards[key] == 1 and not self._steps:
            self._no_grad[key] = NoGrad(root, self._entries)
            run("probe:no-grad", self._no_grad[key].begin)
            run("probe:axes", self._axes.begin)

    def _look_at_inputs(self, root: torch.nn.Module, key: int, tensors: Tensors) -> None:
        """Look at what a forward that trains is given."""
        run, first = self._run, self._loop.trained == len(self._loop.lines) + 1
        if alike := run("probe:views", self._views.forward, root, tensors(), first=first):
            self.tell(alike, alike.inside)
        inputs = self._inputs.get(key)
        if inputs is None:
            inputs = self._inputs[key] = Inputs(lambda fact: self._tell_inputs(fact, key), self._entries)
        elif self._forwards[key] in _AGAIN and key in self._inputs_told:
            number = self._forwards[key]
            inputs = Inputs(lambda fact: self._tell_compared(fact, key, number), self._entries)
            self._inputs[key] = inputs
        run("probe:inputs", inputs.begin, tensors)

    def _tell_inputs(self, fact: InputStatistics, key: int) -> None:
        self._inputs_told[key] = fact
        self._announce(self._at(fact), key)

    def _tell_compared(self, fact: InputStatistics, key: int, forwards: int = 0) -> None:
        trained = self._inputs_told[key]
        if trained.layer == fact.layer:
            told = EvaluationInputs(
                layer=fact.layer,
                mean=fact.mean,
                std=fact.std,
                trained_mean=trained.mean,
                trained_std=trained.std,
                forwards=forwards,
            )
            self._announce(self._at(told), key)

    def _begins_without_gradients(self, root: torch.nn.Module, key: int, tensors: Tensors) -> None:
        seen = self._evaluation
        if self._put_in.waits and not internals.in_train_mode(root):
            self._run("probe:moves", self._put_in.evaluates, self._roots(), user_location())
        if key in self._inputs_told and not internals.in_train_mode(root):
            inputs = self._evaluated_inputs.get(key)
            if inputs is None:
                inputs = Inputs(lambda fact: self._tell_compared(fact, key), self._entries)
                self._evaluated_inputs[key] = inputs
            self._run("probe:inputs", inputs.begin, tensors)
        if not self._run("probe:modes", self._modes.evaluates_in_train, root):
            seen.forwards = seen.elsewhere = 0
            self._rollouts.forget()
            return
        seen.forwards += 1
        samples = self._loaders.samples
        seen.elsewhere += None not in {samples, self._trained_on} and samples != self._trained_on
        seen.location = seen.location or user_location()
        if seen.forwards > 1:  # one or two views are a part of many training steps
            self._run("probe:rollouts", self._rollouts.given, tensors())

    def _output(self, event: events.ForwardEnded) -> None:
        """Look at a DDP forward that has ended."""
        wrapper = self._models.wrapped(event.ddp)
        self._ends(internals.unwrap_compiled(event.ddp.module), wrapper.index, event)

    def _module_output(self, event: events.ModuleForwardEnded) -> None:
        """Look at the forward of a model that no DDP wraps."""
        if (index := self._plain.index(event.module)) is not None:
            self._ends(event.module, index, event)

    def _ends(
        self,
        root: torch.nn.Module,
        key: int,
        event: events.ForwardEnded | events.ModuleForwardEnded | events.EvaluationForwardEnded,
    ) -> None:
        run = self._run
        if draws := run("probe:chance", self._chance.end, root):
            self.tell(replace(draws, reconstructs=self._reconstructs))
        for looks in (self._inputs, self._evaluated_inputs):
            if key in looks:
                run("probe:inputs", looks[key].end)
        if key in self._no_grad:
            self._no_grad[key].release()
        self._axes.release()
        if key in self._cuts and torch.is_grad_enabled():
            cut = run("probe:cuts", self._cuts.pop(key).end)
            if cut is not None:
                self.tell(cut)
        if torch.is_grad_enabled() and (self._forwards.get(key) == 2 or self._stage.begins):
            if not self._stage.begins:
                assert not isinstance(event, events.EvaluationForwardEnded)
                run("probe:unregistered", self._unregistered, root, event)
                run("probe:attention", self._attends, event)
            self._stage.begins = False
            run("probe:audit", self.audit.output, root, event.outputs())

    def _unregistered(self, root: torch.nn.Module, event: events.ForwardEnded | events.ModuleForwardEnded) -> None:
        """Look for parameters that an output was computed with and that nobody has."""
        optimizers = [o for watch in self._state.watches for o in watch.optimizers()]
        own = [p for module in self._roots() for p in internals.parameters(module)]
        # FSDP computes with whole parameters of its own, in the place of those that the model has
        sharded = internals.any_distributed([*own, *[p for o in optimizers for p in internals.params(o)]])
        if not self._threads.several and not sharded:
            known = {id(p) for p in own} | held_by(optimizers)
            tensors = list(event.tensors())
            known |= self.audit.held() | {id(t) for t in tensors}
            names = unregistered(list(event.outputs()), tensors, root, known)
            if names:
                self.tell(UnregisteredParameters(names=tuple(names)))

    def _attends(self, event: events.ForwardEnded | events.ModuleForwardEnded) -> None:
        """Look for a mask that attention adds and that hides nothing."""
        for mask in added_masks(list(event.outputs())):
            self.tell(replace(mask, location=user_location()))

    def cut(self) -> None:
        """Discard the notes of a step that a user's exception has interrupted."""
        self.abort()
        self._stepping.clear()
        self._closure, self._loop = None, _Loop()
        self._labels.take({})
        for trial in self._trials:
            trial.drop()

    def _fails(self, event: events.ForwardFailed) -> None:
        self.abort()
        if isinstance(event.error, RuntimeError) and _UNREDUCED in text_of(event.error):  # no further step will come
            self._tell_no_grad()

    def abort(self) -> None:
        """Remove the hooks of a forward that is over."""
        self._chance.release()
        for inputs in [*self._inputs.values(), *self._evaluated_inputs.values()]:
            inputs.release()
        for cuts in self._cuts.values():
            cuts.release()
        self._cuts.clear()
        self._axes.release()
        for seen in self._no_grad.values():
            seen.release()

    def _tell_no_grad(self) -> None:
        for seen in self._no_grad.values():
            seen.release()
            if (fact := seen.found()) is not None:
                self.tell(fact)
        self._no_grad.clear()

    def _end_evaluation(self, batch: Tensors | None = None) -> None:
        """Announce the forwards without gradients that are over; `batch` is trained on next, where that is known."""
        seen = self._evaluation
        if not seen.forwards:
            return
        step = self._state.next_step()
        if seen.forwards >= EVALUATION or seen.elsewhere >= OF_OTHER_DATA:
            since = step - seen.since
            collected = self._run("probe:rollouts", self._rollouts.collected, () if batch is None else batch()) or False
            fact = TrainModeValidation(forwards=seen.forwards, location=seen.location, since=since, collected=collected)
            self.tell(fact, (seen.location, min(since, _MAX_SINCE), collected))
        else:
            self._rollouts.forget()
        self._evaluation = _Evaluation(since=step)

    # --- backward -----------------------------------------------------------------------------------------------------

    def _begin_backward(self, event: events.BackwardBegan) -> None:
        """Note a backward that begins."""
        if self._state.in_backward:
            return
        self._run("probe:clearing", self._begin_clearing)
        if repeated := self._run("probe:epochs", self._epochs.backward_begins, self._trains()):
            self.tell(repeated)
        loop = self._loop
        loop.scale = self._calls.known_scale() if self._calls.is_scaled else None
        if loop.idle is not None:
            loop.clipped_nothing, loop.idle = ScaledClip(location=loop.idle, idle=True), None
        loop.lines.append(user_location())
        if loop.scale is not None:
            loop.scales[loop.lines[-1]] = loop.scale
        if loop.scale is not None or any([is_multiplied(root) for root in event.roots]):
            loop.scaled.add(loop.lines[-1])

    def _begin_clearing(self) -> None:
        optimizer = None if self._closure is None else self._closure()
        if optimizer is not None:
            self._take_back()
            number, before = evaluations(optimizer), self._evaluated
            self._evaluated = number
            if before is not None and number != before:
                self.clearing.used(optimizer)
        self.clearing.begin_backward()

    def _take_back(self) -> None:
        """Forget what was noted of the gradients before a step whose closure makes others."""
        flags, given = self._given
        shown = self._state.since.parts[RecipeNotes]
        shown.flags &= ~flags
        for name in given:
            shown.recipe.pop(name, None)
        self._given = Flag(0), ()

    def _look_at_loss(self, event: events.BackwardBegan) -> None:
        """Look at what the loss is made of, before backward frees its graph."""
        state, loop, roots = self._state, self._loop, event.roots
        if state.in_backward or not _have_numbers(roots):
            return
        line = user_location()
        number = self._passes[line] = self._passes.get(line, 0) + 1
        if len(roots) != 1 or roots[0].numel() != 1 or not (number <= _FIRST_PASSES or state.checking):
            return
        root, scaled = roots[0], self._calls.is_scaled
        scale = self._calls.known_scale() if scaled else None
        found = terms(root, by_scaler=scaled)
        if "probe:recipe" not in self._guard.off:  # which begins a new list with each step
            loop.losses.note(found, root, by_scaler=scaled)
            loop.in_part = loop.in_part or (scale is not None and is_scaled_in_part(root, scale))
        self._look_at_terms(found, line)
        for given in made_of_softmax(found, root):
            self._tell_once(given, line)
        if targets := self._run("probe:labels", self._targets.read, found, root, loop.rows, by_scaler=scaled):
            self._announce(self._at(targets))
        if self._state.wrappers or self._state.is_sharded:  # ranks that train one model
            settings = self._run("probe:labels", self._settings.look, root, line, by_scaler=scaled)
            if settings is not None:
                self._announce(self._at(settings[1]), settings[0])
        if self._captures.current and not (dist.is_initialized() and dist.get_rank()):  # one rank asks for all
            self._run("probe:leaks", self._try_forward, found, root, scale, scaled=scaled)
        if number == 1:
            self._look_at_first(found, root, scale, line)

    def _loss_shares(self, event: events.StepClosing) -> None:
        record, parts = event.record, event.record.since.parts
        wrappers = self._state.wrappers
        if record.optimizer or not wrappers or any([wrapper.hook for wrapper in wrappers]):
            return  # what DDP itself averages over the ranks is meant
        rescaled = parts[RecipeNotes].flags & Flag.GRADS_WRITTEN
        self._settings.step_ends(record.step, () if rescaled else parts[Losses].label_shares)

    def _look_at_terms(self, found: list[Term], line: str | None) -> None:
        """Look at each loss function that a loss is made of."""
        for term in found:
            for fact in facts(term):
                self._tell_once(fact, line)
            self._run("probe:labels", self._labels.read, term)
            target = saved_tensor(term.node, "target")
            if mixed := self._run("probe:axes", self._axes.mixed, target):
                self._tell_once(mixed, line)
            self._reconstructs |= target is not None and target.data_ptr() in self._loop.given

    def _look_at_first(self, found: list[Term], root: torch.Tensor, scale: float | None, line: str | None) -> None:
        """Look at what only the first loss of a line shows."""
        for mixed in self._run("probe:axes", mixed_up, found, root) or ():
            self._tell_once(mixed, line)
        if (single := softmax_of_one(root)) is not None:
            self.tell(replace(single, location=expression(user_frame()) or line))
        if not self._state.next_step() and len(found) == 1:
            first = self._run("probe:labels", self._labels.initial, found[0], root, scale)
            if first is not None:
                self.tell(replace(first, location=line))

    def _try_forward(self, found: list[Term], root: torch.Tensor, scale: float | None, *, scaled: bool) -> None:
        """Let the forward be tried with other inputs: its targets' once, when the loss has fallen far."""
        newest = self._captures.current[-1]
        if self._mixing is not None:
            self._mixing.loss(newest, self._loaders.batch)
        if self._leaks is None or len(found) != 1 or (scaled and (scale is None or math.isnan(scale))):
            return

        def reader() -> Callable[[], float]:
            read = loss_reader(root.detach(), None)
            return lambda: read() / (scale or 1.0)

        self._leaks.loss(newest, *target_of(found[0]), reader)

    def _end_backward(self, _: events.BackwardEnded) -> None:
        """See which gradients have come."""
        if not self._state.in_backward:
            self._backwards += 1
            loop = self._loop
            if self._run("probe:epochs", self._epochs.backward_ends, self._trains()):
                loop.recomputed = True
            elif loop.input_gradient and len(loop.lines) == 1:
                loop.attacks = loop.shapes
            self._run("probe:clearing", self._end_clearing)

    def _end_clearing(self) -> None:
        self.clearing.end_backward(self._loop.lines[-1] if self._loop.lines else None)
        optimizer = None if self._closure is None else self._closure()
        if optimizer is not None and self.clearing.carries(optimizer):
            shown = self._state.since.parts[RecipeNotes]
            shown.flags |= Flag.GRADS_CARRIED
            shown.recipe.setdefault("carried", CarriedGradients(location=user_location()))

    def _epoch_begins(self, _: events.EpochBegan) -> None:
        self._loop.new_epoch = True
        if repeated := self._run("probe:epochs", self._epochs.begins, self._trains()):
            self.tell(repeated)

    # --- what stands between backward and step ------------------------------------------------------------------------

    def _clipped(self, event: events.Clipped | events.ValuesClipped) -> None:
        """Note a gradient clipping."""
        if "probe:recipe" in self._guard.off:  # nothing would ever begin a new step
            return
        loop, line = self._loop, event.location or "unknown"
        if not loop.lines:  # of what a step has used, or of nothing, unless another optimizer steps next
            measures = isinstance(event, events.Clipped) and math.isinf(event.limit)
            loop.idle = None if measures else line
            return
        if isinstance(event, events.Clipped) and event.nothing:
            loop.clipped_nothing = ScaledClip(location=line, instead="nothing")
            return
        if loop.scale is not None and loop.scale != 1.0:
            loop.clip = loop.clip or line
        loop.touched = True
        if isinstance(event, events.Clipped) and not math.isinf(event.limit):
            if loop.clips.get(line, len(loop.lines)) < len(loop.lines) and self.clearing.number() == 1:
                loop.early = line
            loop.clips[line] = len(loop.lines)
        if self._state.next_step() >= _FIRST_PASSES and not self._state.checking:
            return
        if not isinstance(event, events.Clipped) or event.given is None:
            loop.clipped = None
        elif loop.clipped is not None and not math.isinf(event.limit):
            loop.clipped.update([id(parameter) for parameter in event.given])
            loop.clip_line = line

    def _unscaled(self) -> None:
        """Note that the gradients carry no loss scale any more."""
        self._loop.scale, self._loop.touched = None, True
        self._loop.scales.clear()

    def _scaler_steps(self, event: events.ScalerSteps) -> None:
        """Note that GradScaler is about to step, and to unscale what was not unscaled before."""
        loop = self._loop
        if loop.clip is not None:
            self._state.since.parts[RecipeNotes].flags |= Flag.CLIPPED_SCALED
            on_host = loop.scale is not None and not math.isnan(loop.scale)
            clip = ScaledClip(location=loop.clip, scale=loop.scale if on_host else None)
            self._state.since.parts[RecipeNotes].recipe["clip"] = clip
        elif loop.in_part or self._is_unscaled(event.optimizer):
            self._state.since.parts[RecipeNotes].flags |= Flag.CLIPPED_SCALED
            clip = ScaledClip(location=loop.lines[-1] if loop.lines else None, instead="part")
            self._state.since.parts[RecipeNotes].recipe["clip"] = clip
        self._unscaled()

    def _is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer uses gradients of a loss that was not scaled, as far as that is known."""
        loop = self._loop
        if loop.scaled:
            return set(loop.lines) != loop.scaled and self.clearing.number() == 1
        line = self.clearing.of(optimizer).line
        return line is not None and line in loop.lines

    # --- optimizer ----------------------------------------------------------------------------------------------------

    def _moved(self, event: events.StepClosing) -> None:
        """Announce frozen parameters that a step has moved."""
        if names := self._moves.after(event):
            fact = MovedParameters(names=names[:_MAX_NAMES], number=len(names), location=user_location())
            self.tell(fact, names)

    def _resized(self, elements: int) -> Flag:
        """Return how the inputs' size differs from that of the step before."""
        before, self._elements = self._elements, elements
        if not elements or not before or elements == before:
            return Flag(0)
        return Flag.BATCH_GREW if elements > before else Flag.BATCH_SHRANK

    def _before_step(self, event: events.StepBegan) -> None:
        """Look at what led to an optimizer step."""
        optimizer = event.optimizer
        if id(optimizer) in self._stepping:
            self._stepping.clear()  # its last step has raised
        self._stepping.append(id(optimizer))
        if self._state.in_backward or len(self._stepping) > 1:
            return
        run = self._run
        for trial in self._trials:
            run("probe:leaks", trial.work, self._state.next_step())
        shown, loop = self._state.since.parts[RecipeNotes], self._loop
        flags = self._resized(loop.elements)
        detail = shown.recipe
        if loop.in_eval and loop.in_eval == loop.trained and loop.lines:
            flags |= Flag.EVAL_MODE | loop.mode_flags
            names = tuple(loop.eval_modules[:_MAX_NAMES])
            detail["modes"] = EvalForwards(modules=names, part=loop.eval_part, location=loop.location)
        flags |= self._gradients_of(event, detail)
        flags |= run("probe:labels", self._labels.take, detail) or Flag(0)
        run("probe:resume", self._resume.before_step, optimizer)
        run("probe:epochs", self._epochs.before_step, self._trains())
        found = run("probe:schedules", self.schedules.before_step, optimizer, len(loop.lines)) or {}
        detail.update(found)
        for pace in self.schedules.paces():
            self.tell(pace)
        if loop.clipped_nothing is not None and not loop.touched and not self.clearing.of(optimizer).is_zero():
            flags |= Flag.CLIPPED_SCALED
            detail["clip"] = loop.clipped_nothing
        elif loop.clipped and "clip" not in detail and self._cuts_layers(loop.clipped):
            flags |= Flag.CLIPPED_SCALED
            detail["clip"] = ScaledClip(location=loop.clip_line, instead="layers")
        flags |= Flag.SCHEDULED_OFTEN if "scheduler" in found else Flag(0)
        flags |= Flag.SCHEDULED_ELSEWHERE if "elsewhere" in found else Flag(0)
        shown.flags |= flags
        with self._threads.alone() as alone:
            if alone:
                run("probe:audit", self._count, optimizer)

    def _gradients_of(self, event: events.StepBegan, detail: dict[str, Any]) -> Flag:
        """Say what became of the gradients; a closure may only return a loss (Lightning), or make others."""
        given: dict[str, Any] = {}
        flags = Flag(0)
        if self._loop.lines or not event.closure:
            flags = self._run("probe:clearing", self._gradients, event.optimizer, given) or Flag(0)
            detail.update(given)
        self._given = flags, tuple(given)
        if event.closure:
            self._closure, self._evaluated = weakref.ref(event.optimizer), None
        return flags

    def _cuts_layers(self, clipped: set[int]) -> bool:
        """Return whether of some layer the weight is clipped and the bias is not, or the other way round."""
        for root in self._roots():
            for module in internals.modules(root):
                own = internals.parameters_of(module)
                pair = [p for p in (own.get("weight"), own.get("bias")) if p is not None and p.grad is not None]
                if len({id(p) in clipped for p in pair}) > 1:
                    return True
        return False

    def _gradients(self, optimizer: torch.optim.Optimizer, detail: dict[str, Any]) -> Flag:
        """Say what became of the gradients since the last step, and how many passes, of which lines, have made them."""
        loop, flags = self._loop, Flag(0)
        number = len(loop.lines)
        cleared = self.clearing.before_step(optimizer)
        discarded = cleared.gone or cleared.discards
        again = loop.losses.twice and not discarded and not cleared.written
        attack = loop.attacks == loop.shapes and len(set(loop.lines)) > 1 and not discarded and not cleared.written
        kinds = {"loss": cleared.mixed, "attack": attack, "again": loop.recomputed, "twice": again}
        kind = None if cleared.carried else next(iter([name for name, holds in kinds.items() if holds]), None)
        if cleared.carried or kind is not None:
            flags |= Flag.GRADS_CARRIED
            line = loop.lines[-1] if kind == "twice" and loop.lines else user_location()
            detail["carried"] = CarriedGradients(location=line, kind=kind)
        if cleared.written and not loop.touched:
            flags |= Flag.GRADS_WRITTEN
        if not discarded and (clip := self._scale(optimizer, written=cleared.written)) is not None:
            flags |= Flag.CLIPPED_SCALED
            detail["clip"] = clip
        if discarded:
            flags |= Flag.GRADS_DISCARDED | (Flag.GRADS_GONE if cleared.gone else Flag(0))
            kind = "all" if cleared.gone else "end of epoch" if loop.new_epoch else "micro-batches"
            location = loop.lines[-1] if loop.lines else None
            count = cleared.discards + cleared.gone
            detail["discarded"] = DiscardedGradients(kind=kind, count=count, location=location)
        if loop.input_gradient or "probe:recipe-forward" in self._guard.off:
            flags |= Flag.INPUT_GRADIENT
        if loop.trained < number:
            flags |= Flag.FEWER_FORWARDS
        if len(set(loop.lines)) != 1:
            flags |= Flag.NOT_ONE_LINE
        # what reduces by itself does not average by DDP's rule
        ranks = self._state.world if self._state.wrappers else 1
        line, reduced = loop.lines[0] if loop.lines else None, self._state.since.parts[ShardSums].divided
        other = [Reduced(*found) for found in reduced if 0 < found[0] != found[1]] if len(reduced) == 1 else []
        if (sums := loop.losses.of(number, line, ranks, *other)) is not None:
            flags |= Flag.MEANS_ADDED
            detail["accumulation"] = sums
        if (twice := self._twice(optimizer)) is not None:
            flags |= Flag.STEPPED_TWICE
            detail["twice"] = twice
        return flags

    def _scale(self, optimizer: torch.optim.Optimizer, *, written: bool) -> ScaledClip | None:
        """Say which loss scale the gradients carry that a step uses, that they lack one, or were clipped too early.

        Those that are `written` after the last backward may have been unscaled by hand.
        """
        loop = self._loop
        scale = None if written else loop.scales.get(self.clearing.of(optimizer).line)
        if scale is not None and scale != 1.0:
            return ScaledClip(location=user_location(), scale=None if math.isnan(scale) else scale, instead="step")
        if loop.early is not None:
            return ScaledClip(location=loop.early, instead="early")
        never = loop.float16 and not loop.scaled and not written and loop.lines
        return ScaledClip(location=loop.lines[-1], instead="never") if never else None

    def _twice(self, optimizer: torch.optim.Optimizer) -> SteppedTwice | None:
        """Say which parameters another optimizer has stepped with the same gradients."""
        other = None if self._last is None or self._last[1] != self._backwards else self._last[0]()
        if other is None or other is optimizer or not self._backwards:
            return None
        both = held_by([optimizer]) & held_by([other])
        if not both:
            return None
        names = [
            n for m in self._roots() for n, p in internals.named_parameters(m) if id(p) in both and p.grad is not None
        ]
        return SteppedTwice(other=type(other).__name__, names=tuple(names[:_MAX_NAMES])) if names else None

    def _look_at_ties(self) -> None:
        """Say which parameters train apart that were one when the model was built."""
        built = self._entries.built
        if pairs := built.ties.broken(self.audit.held()):
            names = built.names([parameter for pair in pairs for parameter in pair])
            known = [(names[id(a)], names[id(b)]) for a, b in pairs if id(a) in names and id(b) in names]
            if known:
                self.tell(BrokenTies(pairs=tuple(known[:_MAX_NAMES])))

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        self._follow(optimizer)
        if self._stage.optimizer is None or self._stage.optimizer() is not optimizer:
            return
        if self._steps == FIRST:
            self._look_at_ties()
        fact = self.audit.at_step(self._steps, optimizer, self._trained())
        if self._no_grad:
            self._look_for_gradients(optimizer)
        self._steps += 1
        if self._steps == _CUTS:
            pairs = [(w, module) for w in self._trained() if (module := w.module()) is not None]
            self._cuts = {
                w.index: Cuts(m, lacking, self._entries) for w, m in pairs if (lacking := self.audit.lacking(w))
            }
        if fact is not None:
            self._announce(fact)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Choose whose steps are counted: the first optimizer's, until a stage of training begins with another one."""
        known = None if self._stage.optimizer is None else self._stage.optimizer()
        if known is optimizer:
            self._stage.apart = 0
            return
        self._stage.apart += 1
        if known is not None and (self._stage.apart < _APART or optimizer in self._stage.known):
            return  # they take turns
        held = held_by([optimizer])
        self._stage.optimizer, self._stage.apart = weakref.ref(optimizer), 0
        self._stage.known[optimizer] = None
        if self._stage.params and held != self._stage.params and self._stage.number < _MAX_STAGES:
            self._stage.number, self._steps, self._stage.begins = self._stage.number + 1, 0, True
            self.audit.begin()
        self._stage.params = held  # one that was built again for the same goes on

    def _look_for_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow what ran without gradients in the first forward."""
        if self._steps == 0:
            held = held_by([optimizer])
            for wrapper in self._trained():
                if (seen := self._no_grad.get(wrapper.index)) is not None:
                    seen.mark(p for p in self.audit.lacking(wrapper) if id(p) in held)
            return
        for seen in self._no_grad.values():
            seen.keep()
        if self._steps >= LAST:
            self._tell_no_grad()

    def _after_step(self, event: events.StepEnded) -> None:
        """Begin the next step."""
        optimizer = event.optimizer
        if not self._stepping or self._stepping.pop() != id(optimizer) or self._stepping:
            return
        if self._state.in_backward:
            return
        self._end_evaluation()
        number = self._state.next_step() - 1
        looks = self._state.checking and not self._state.passes
        self._run("probe:beside", self._beside.after_step, number, looks=looks)
        if grown := self._run("probe:audit", self._hooks.look, self._roots(), number):
            self.tell(grown)
        self._trained_on = self._loaders.samples if self._trained_on is None else self._trained_on
        self._closure = None
        self._run("probe:clearing", self.clearing.after_step, optimizer)
        self._run("probe:moves", self._put_in.after_step, self._roots())
        self._last = (weakref.ref(optimizer), self._backwards)
        self._loop = _Loop()

    def _passed(self, event: events.StepPassed) -> None:
        """Count a step that was not watched."""
        self._backwards += event.backwards
        self.schedules.passed(event.optimizer)

    def _woken(self, event: events.Woken) -> None:
        """Begin anew after steps that were not watched."""
        self._last = None
        if event.optimizer is not None:
            self.clearing.after_step(event.optimizer)

    def _skipped(self, event: events.StepSkipped) -> None:
        """Begin the next step after one that GradScaler did not let happen."""
        self._run("probe:clearing", self.clearing.after_step, event.optimizer)
        self._run("probe:schedules", self.schedules.forgive)
        for trial in self._trials:
            trial.drop()
        self._labels.take({})
        self._loop = _Loop()

    def close(self, *, finished: bool = False) -> None:
        """Announce facts that only the end shows; those about schedulers by epoch only if the run has `finished`."""
        self.abort()
        self._beside.release()
        if os.getpid() != self._pid:  # a forked child (a loader's worker) is not the rank, and has no one to tell
            return
        self._end_evaluation()
        for fact in self.schedules.at_end(self._state.world) if finished else ():
            self.tell(replace(fact, passes=self._backwards))
        counts = self._labels.counts(self._roots())
        if counts is not None:
            self.tell(counts)

    # --- announcements ------------------------------------------------------------------------------------------------

    def _at(self, fact: Announcement) -> Announcement:
        fields: dict[str, Any] = {"step": self._state.next_step()}
        return replace(fact, **fields)

    def _tell_once(self, fact: Fact, line: str | None) -> None:
        """Announce what was not announced of a line yet."""
        known, what = self._known.setdefault(type(fact), set()), (line, gist(fact))
        if what not in known and len(known) < _MAX_DIFFERENT:
            known.add(what)
            self._announce(self._at(replace(fact, location=line)))

    def tell(self, fact: Announcement, about: Hashable = None) -> None:
        """Announce a fact of this step, only the first few of each kind; `about` distinguishes within a kind."""
        told = self._told.setdefault(type(fact), {})
        if about in told or len(told) < _MAX_DIFFERENT:
            told[about] = told.get(about, 0) + 1
            if told[about] <= _MAX_FACTS:
                self._announce(self._at(fact))


def _have_numbers(roots: Sequence[torch.Tensor]) -> bool:
    """Return whether what losses are made of may be read: not of fake tensors, and of classes of the script's."""
    return all([internals.is_plain(root) or internals.is_distributed(root) for root in roots])
