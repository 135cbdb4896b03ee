"""Events of a training loop: each one's place in the loop, and the order of the probes that get it.

    for batch in loader:                         EpochBegan, WorkersBegan, BatchAwaited, IndicesDrawn, BatchDelivered,
                                                 EpochEnded, Paused
        output = ddp(batch)                      ForwardBegan
                                                   ForwardPrepared      inputs are on the device, buffers broadcast
                                                     FirstForward       once
                                                 ForwardEnded, or ForwardFailed
        loss = loss_function(output, target)
        scaler.scale(loss)                       LossScaled
            .backward()                          BackwardBegan
                                                   LossGiven            one number, and backward begins here
                                                   LossExamined         not finite, or its backward is to be watched
                                                   (each gradient)      no event: `gradient_hooks` is called directly
                                                 BackwardEnded, or BackwardFailed
                                                   NeverStepped         many of these, and no optimizer has stepped
        scaler.unscale_(optimizer)               Unscaled
        clip_grad_norm_(...)                     Clipped, or ValuesClipped
        scaler.step(optimizer)                   ScalerSteps
            optimizer.step()                     StepBegan
                                                   CopyTrained          by an optimizer of a copy; nothing of the rest
                                                   ParametersUnwrapped  the optimizer has parameters that no DDP has
                                                   StepOpened           the record exists, parameters are as before
                                                   GradientsFinal       as the optimizer uses them, or has used them
                                                   NonfiniteMade        by this rank; nothing is changed yet
                                                 StepEnded, or StepSkipped by the scaler
                                                   StepClosing          probes fill in what the step has left behind
                                                     StateRead          the optimizer's state
                                                   StepClosed           the record is complete
        scheduler.step()                         SchedulerStepped

    Steps that are not watched (`unwatched_steps.py`) have StepPassed and, as one that is watched begins after them,
    Woken.

    Where no optimizer exists and the script updates its parameters by hand, GradientsFinal comes after BackwardEnded,
    and StepClosing and StepClosed as the next forward with gradients begins, if the parameters have changed until then.

        model.load_state_dict(...)               Paused, Loaded

A model that no DDP wraps has ModuleForwardBegan, ModuleForwardEnded and ModuleForwardFailed instead, one that is
evaluated around its DDP has EvaluationForwardBegan and EvaluationForwardEnded. Beside the loop:
DDPBuilds, DDPBuilt, NoSyncEntered, HookRegistered, OptimizerBuilt, OptimizerEnded, SchedulerBuilt, CollectiveBegan,
Gathered, Averaged, SubsetMade, GroupEnds, CheckpointRead.

`instrument/patches.py` emits what torch is called for, each event once; events that are indented further are emitted by
the probe that knows them. A probe subscribes in its constructor. Each subscriber runs under the guard with a part of
its own: one that fails is off, and the others hear of it as before. Where an event cannot be made, those that would
hear of it are off: they would know half of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpdebug.isolation.guard import Guard
from ddpdebug.nested import tensors_in
from ddpdebug.probes.nonfinite_notes import Looks
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.record import StepRecord


class Tensors:
    """The tensors in nested values, in order; searched once, on first use."""

    __slots__ = ("_found", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._found: Sequence[torch.Tensor] | None = None

    def __call__(self) -> Sequence[torch.Tensor]:
        """Return them."""
        if self._found is None:
            self._found = tensors_in(self._value)
        return self._found


class Event:
    """An event in the training thread.

    `order` names the parts that hear of it from the first to the last; others come after these, in the order in which
    they have subscribed.
    """

    __slots__ = ()
    order: ClassVar[tuple[str, ...]] = ()


class Bus:
    """The subscriptions to events.

    Args:
        guard: what subscribers run under.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard, self._run = guard, guard.run
        self._looks: dict[type[Event], tuple[tuple[str, Callable[[Any], Any]], ...]] = {}

    def on(self, part: str, kind: type[Event], look: Callable[[Any], Any]) -> None:
        """Call `look` with each event of a kind, under the guard as `part`."""
        order = kind.order
        looks = [*self._looks.get(kind, ()), (part, look)]
        looks.sort(key=lambda entry: order.index(entry[0]) if entry[0] in order else len(order))
        self._looks[kind] = tuple(looks)
        self._guard.needs(part, part_of(kind))

    def emit(self, event: Event, only: frozenset[str] | None = None) -> None:
        """Pass an event to all subscribers, or only to some parts."""
        for part, look in self._looks.get(type(event), ()):
            if only is None or part in only:
                self._run(part, look, event)


def part_of(kind: type[Event]) -> str:
    """Return the part under which events of a kind are emitted."""
    return f"event:{kind.__name__}"


# --- forward ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForwardBegan(Event):
    """A DDP is called, with gradients or without.

    Args:
        tensors: those among the arguments.
    """

    order = (
        "probe:by-hand",
        "probe:evaluation",
        "probe:broadcast",
        "probe:gather",
        "probe:last-state",
        "probe:memory",
        "probe:forward",
        "probe:recipe-forward",
        "probe:numerics-forward",
    )
    ddp: DistributedDataParallel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class ForwardPrepared(Event):
    """A DDP has moved its inputs to its device and has broadcast its buffers; the module's forward comes next."""

    order = ("probe:own-times", "probe:device-times", "probe:buffers", "probe:scene")
    ddp: DistributedDataParallel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ForwardEnded(Event):
    """A DDP returns.

    Args:
        tensors: those among the arguments.
        outputs: those in what it returns.
    """

    order = (
        "probe:device-times",
        "probe:numerics-forward",
        "probe:memory",
        "probe:forward",
        "probe:recipe-forward",
        "probe:scene",
    )
    ddp: DistributedDataParallel
    tensors: Tensors
    outputs: Tensors


@dataclass(frozen=True, slots=True)
class ForwardFailed(Event):
    """A DDP's forward has raised."""

    order = ("probe:numerics-forward", "probe:recipe-forward", "probe:forward", "probe:memory")
    ddp: DistributedDataParallel
    error: BaseException


@dataclass(frozen=True, slots=True)
class FirstForward(Event):
    """The first forward with gradients begins."""


@dataclass(frozen=True, slots=True)
class ModuleForwardBegan(Event):
    """A model that no DDP wraps is called."""

    order = (
        "probe:by-hand",
        "probe:evaluation",
        "probe:batch",
        "probe:recipe-forward",
        "probe:scene",
        "probe:numerics-forward",
    )
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModuleForwardEnded(Event):
    """A model that no DDP wraps returns."""

    order = ("probe:numerics-forward", "probe:recipe-forward", "probe:scene")
    module: torch.nn.Module
    tensors: Tensors
    outputs: Tensors


@dataclass(frozen=True, slots=True)
class ModuleForwardFailed(Event):
    """The forward of a model that no DDP wraps has raised."""


@dataclass(frozen=True, slots=True)
class EvaluationForwardBegan(Event):
    """A model that a DDP wraps is called directly, without gradients and in eval mode."""

    module: torch.nn.Module
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class EvaluationForwardEnded(Event):
    """A model that a DDP wraps returns from such a direct call."""

    module: torch.nn.Module
    outputs: Tensors


# --- backward ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BackwardBegan(Event):
    """`torch.autograd.backward` is called, also by `Tensor.backward`.

    Args:
        roots: the tensors that it is called on, as far as that is known: none where it is given an iterator.
    """

    order = ("probe:losses", "probe:recipe", "probe:memory", "probe:gather", "probe:backward")
    roots: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossGiven(Event):
    """A loss of one number is given to the outermost backward.

    Args:
        read: returns it unscaled, and may wait for a device.
    """

    loss: torch.Tensor
    read: Callable[[], float]


@dataclass(frozen=True, slots=True)
class LossExamined(Event):
    """The graph of a loss is about to be freed: whoever knows the operation that spoiled it notes it in `looks`.

    Args:
        finite: it is, and only its gradient may be spoiled.
    """

    loss: torch.Tensor
    looks: Looks
    finite: bool


@dataclass(frozen=True, slots=True)
class BackwardEnded(Event):
    """A backward returns: gradients have arrived, and are reduced if DDP reduces them."""

    order = ("probe:device-times", "probe:backward", "probe:parameters", "probe:recipe", "probe:by-hand")


@dataclass(frozen=True, slots=True)
class BackwardFailed(Event):
    """A backward has raised: it is unknown which gradients have arrived."""

    order = ("probe:memory", "probe:backward")
    error: BaseException


@dataclass(frozen=True, slots=True)
class NeverStepped(Event):
    """Backward has run many times without any optimizer step."""


@dataclass(frozen=True, slots=True)
class CopyTrained(Event):
    """An optimizer begins to train a copy of the model, with so many `parameters`; its steps are not checked."""

    parameters: int


# --- what stands between backward and step ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossScaled(Event):
    """`GradScaler.scale` has multiplied a loss; `scale` is None where the scaler is switched off."""

    scale: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Unscaled(Event):
    """`GradScaler.unscale_` has divided the gradients."""


@dataclass(frozen=True, slots=True)
class Clipped(Event):
    """`clip_grad_norm_` or `clip_grads_with_norm_` has returned; `location` is the line that called it.

    Args:
        given: the parameters, None where they came from a generator, which is used up.
        norm_type: 2 for the euclidean norm.
        nothing: there was no gradient among what it was given.
    """

    norm: torch.Tensor
    limit: float
    location: str | None
    given: Sequence[torch.Tensor] | None = None
    norm_type: float = 2.0
    nothing: bool = False


@dataclass(frozen=True, slots=True)
class ValuesClipped(Event):
    """`clip_grad_value_` has returned."""

    location: str | None


@dataclass(frozen=True, slots=True)
class ScalerSteps(Event):
    """`GradScaler.step` is called, and unscales what was not unscaled before."""

    scaler: Any
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class CollectiveBegan(Event):
    """A communicating function of `torch.distributed` is called."""


@dataclass(frozen=True, slots=True)
class Gathered(Event):
    """`all_gather` of a tensor that needs a gradient has returned."""

    outputs: list[Any]
    tensor: torch.Tensor
    location: str | None


# --- step -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepBegan(Event):
    """An optimizer is about to step; `closure` tells whether it computes its gradients itself."""

    order = ("probe:recipe", "probe:evaluation", "probe:optimizer")
    optimizer: torch.optim.Optimizer
    closure: bool


@dataclass(frozen=True, slots=True)
class ParametersUnwrapped(Event):
    """An optimizer steps parameters none of which belong to a DDP."""

    params: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepOpened(Event):
    """The record of a step has been opened; the parameters are those before the step."""

    order = ("probe:parameters", "probe:state")
    watch: OptimizerWatch
    record: StepRecord


@dataclass(frozen=True, slots=True)
class GradientsFinal(Event):
    """The gradients are final: those that the optimizer uses. With a closure this comes after the step."""

    order = ("probe:step-gradients", "probe:numerics")
    watch: OptimizerWatch
    record: StepRecord


@dataclass(frozen=True, slots=True)
class NonfiniteMade(Event):
    """This rank's own forward, loss or gradients are not finite; inputs and parameters are still those of the forward.

    What is found goes into `record.numerics.replay`.
    """

    watch: OptimizerWatch
    record: StepRecord


@dataclass(frozen=True, slots=True)
class StepEnded(Event):
    """An optimizer has stepped."""

    order = ("probe:device-times", "probe:optimizer", "probe:recipe", "probe:evaluation")
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class StepSkipped(Event):
    """`GradScaler.step` has not let an optimizer step."""

    order = ("probe:optimizer", "probe:scaler")
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class StepClosing(Event):
    """A step is over: each probe adds its notes to the record."""

    order = (
        "probe:parameters",
        "probe:state",
        "probe:frozen",
        "probe:replicas",
        "probe:buffers",
        "probe:memory",
        "forensics:holders",
    )
    watch: OptimizerWatch
    record: StepRecord


@dataclass(frozen=True, slots=True)
class StateRead(Event):
    """The optimizer's state after a checked step, or this step's share of it.

    Args:
        keys: (parameter, key) of each tensor.
    """

    order = ("probe:numerics-after", "probe:parameters")
    watch: OptimizerWatch
    record: StepRecord
    keys: Sequence[tuple[str, str]]
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepClosed(Event):
    """The record of a step is complete."""

    order = ("probe:disk", "forensics:elements", "forensics:agreement", "probe:last-state", "probe:scene")
    watch: OptimizerWatch
    record: StepRecord


@dataclass(frozen=True, slots=True)
class OptimizerBuilt(Event):
    """An optimizer has been made."""

    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class OptimizerEnded(Event):
    """An optimizer has been freed, or the run ends: its last step was the last one."""

    order = ("probe:last-state", "forensics:elements")
    watch: OptimizerWatch


@dataclass(frozen=True, slots=True)
class StepPassed(Event):
    """An optimizer has taken an unwatched step with this number, after so many `backwards`."""

    optimizer: torch.optim.Optimizer
    watch: OptimizerWatch
    step: int
    backwards: int


@dataclass(frozen=True, slots=True)
class Woken(Event):
    """The running step is watched after unwatched ones: earlier notes are outdated.

    Args:
        optimizer: that has stepped last.
    """

    optimizer: torch.optim.Optimizer | None


# --- data, schedules, loads -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochBegan(Event):
    """`iter(loader)` is called."""

    loader: torch.utils.data.DataLoader[Any]


@dataclass(frozen=True, slots=True)
class SubsetMade(Event):
    """A `Subset` has been made, by `random_split` or by hand."""

    subset: torch.utils.data.Subset[Any]
    location: str | None


@dataclass(frozen=True, slots=True)
class WorkersBegan(Event):
    """`iter(loader)` has returned an iterator, which owns the workers."""

    iterator: Any


@dataclass(frozen=True, slots=True)
class IndicesDrawn(Event):
    """A loader's iterator has drawn the indices of a batch, which is delivered now or, with workers, later."""

    iterator: Any
    indices: Any


@dataclass(frozen=True, slots=True)
class BatchAwaited(Event):
    """The loop asks for a batch."""


@dataclass(frozen=True, slots=True)
class BatchDelivered(Event):
    """The loop gets a batch."""

    batch: Any
    iterator: Any


@dataclass(frozen=True, slots=True)
class EpochEnded(Event):
    """A loader's iterator has no more batches, or has `failed` to deliver one."""

    iterator: Any
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Paused(Event):
    """Training pauses, at the end of an epoch or before a load: the script may rewrite the model next."""


@dataclass(frozen=True, slots=True)
class CheckpointRead(Event):
    """A distributed checkpoint (`torch.distributed.checkpoint`) is read into what a script has `wanted` of it.

    Args:
        stored: names of what it has.
    """

    wanted: Collection[str]
    stored: Collection[str]
    location: str | None


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """`load_state_dict` of a model or an optimizer, `thing`, has returned `result`; `what` is its class.

    Args:
        given: what it was given, None where a model has taken these tensors for its own.
    """

    what: str
    location: str | None
    thing: Any = None
    result: Any = None
    given: Any = None


@dataclass(frozen=True, slots=True)
class SchedulerBuilt(Event):
    """A scheduler whose constructor does not call its `step` has been made."""

    scheduler: Any


@dataclass(frozen=True, slots=True)
class SchedulerStepped(Event):
    """`scheduler.step()` is called; `absolute` where it is given an epoch or a measure, `measure` if it is a number."""

    scheduler: Any
    absolute: bool
    measure: float | None = None


# --- DDP --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DDPBuilds(Event):
    """A module is about to be wrapped: DDP has not compared or broadcast anything yet."""

    module: torch.nn.Module
    process_group: Any


@dataclass(frozen=True, slots=True)
class DDPBuilt(Event):
    """A module has been wrapped."""

    ddp: DistributedDataParallel


@dataclass(frozen=True, slots=True)
class NoSyncEntered(Event):
    """`ddp.no_sync()` has returned a context."""

    context: Any
    ddp: DistributedDataParallel


@dataclass(frozen=True, slots=True)
class HookRegistered(Event):
    """`ddp.register_comm_hook` has returned."""

    ddp: DistributedDataParallel
    state: Any
    hook: Any


@dataclass(frozen=True, slots=True)
class Averaged(Event):
    """A model averager has run: replicas differ on purpose between averages."""


@dataclass(frozen=True, slots=True)
class GroupEnds(Event):
    """`destroy_process_group` is called: most scripts do this last, while their models are alive.

    Args:
        last: the default group ends, and with it all others.
    """

    order = ("probe:by-hand", "probe:last-state", "probe:optimizer", "exchange:part")

    last: bool = True
