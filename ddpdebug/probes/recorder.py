"""The record of each optimizer step: opened as the step begins, closed as it ends, and handed over.

Here is what makes a step: which forwards and backwards belong to it, the loss, the batch's and the output's digests,
times and counts, and what the next step begins with. What else a record holds the other probes put into it, as they
hear of the events that this one emits.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes import contract, gradients, training_events as events
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.gradient_hooks import GradientHooks
from ddpdebug.probes.loop_calls import LoopCalls
from ddpdebug.probes.models import Models
from ddpdebug.probes.optimizers import OptimizerWatch, first_step, index_of
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.step_state import StepState, Window
from ddpdebug.probes.step_veto import StepVeto
from ddpdebug.probes.training_events import Bus, Tensors
from ddpdebug.probes.values import loss_reader, rng_digest
from ddpdebug.schema.announcements import Announce
from ddpdebug.schema.row import Flag

_OUTPUT_BYTES = 1 << 16
_MAX_EVAL_FORWARDS = 64
_BATCH_BYTES = 1 << 20
#: So many backward passes without any optimizer step are looked into.
_LONELY_BACKWARDS = 8


class Recorder:
    """Makes one rank's records.

    Args:
        models: finds the DDPs.
        hooks: sees the gradients of parameters that come later.
        calls: knows the loss scale.
        veto: may keep an optimizer from a step; None lets all of them step.
        hand_over: takes a finished record; must not block.
        announce: tells all ranks.
        due: tells for (optimizer, step) whether the sampled tier runs.
    """

    def __init__(  # noqa: PLR0913 - what it depends on
        self,
        bus: Bus,
        state: StepState,
        guard: Guard,
        *,
        models: Models,
        hooks: GradientHooks,
        calls: LoopCalls,
        veto: StepVeto | None,
        hand_over: Callable[[StepRecord], None],
        announce: Announce,
        due: Callable[[int, int], bool],
    ) -> None:
        self._bus, self._state, self._guard, self._entries = bus, state, guard, entries_of(guard)
        self._models, self._hooks, self._calls, self._veto = models, hooks, calls, veto
        self._hand_over, self._announce, self._due = hand_over, announce, due
        self._started: list[float] = []  # of the forwards and backwards that run
        self._averaged = False  # a ModelAverager was used: replicas differ on purpose in between
        self._by_optimizer: dict[int, OptimizerWatch] = {}
        self._fused: OptimizerWatch | None = None
        self._fused_stepped = False
        self._stepping: list[int] = []
        self._pre: tuple[OptimizerWatch, StepRecord, float] | None = None
        self._halt: BaseException | None = None
        guard.when_cut(self.cut)
        guard.when_off("probe:backward", self._forget_backward)
        guard.needs("probe:forward", "probe:no-sync")  # whether its backward is meant to be reduced
        guard.needs("probe:losses", "probe:scaler")  # what the losses were multiplied with
        bus.on("probe:forward", events.ForwardBegan, self.begin_forward)
        bus.on("probe:forward", events.ForwardEnded, self.end_forward)
        bus.on("probe:forward", events.ForwardFailed, self._forward_fails)
        bus.on("probe:backward", events.BackwardBegan, self.begin_backward)
        bus.on("probe:backward", events.BackwardEnded, self.end_backward)
        bus.on("probe:backward", events.BackwardFailed, self._backward_fails)
        bus.on("probe:optimizer", events.StepBegan, self.pre_step)
        bus.on("probe:optimizer", events.StepEnded, self.post_step)
        bus.on("probe:optimizer", events.StepSkipped, self._skipped)
        bus.on("probe:wrapper", events.Averaged, self._averages)

    def take_halt(self) -> BaseException | None:
        """Return what the vote on the step that just began asks to be raised, once."""
        halt, self._halt = self._halt, None
        return halt

    def cut(self) -> None:
        """Forget what was half noted when an exception of the user's came through: this step is not judged."""
        state, number = self._state, self._state.window.number
        state.window = Window(
            started=time.perf_counter(), overhead_before=self._guard.elapsed(), number=number, cut=True
        )
        self._stepping.clear()
        self._started.clear()
        self._pre, state.in_backward, self._fused_stepped = None, 0, False
        for wrapper in state.wrappers:
            wrapper.cut()

    def _averages(self, _: events.Averaged) -> None:
        self._averaged = True

    # --- forward ------------------------------------------------------------------------------------------------------

    def begin_forward(self, event: events.ForwardBegan) -> None:
        """Note the inputs and the promise of a DDP forward."""
        ddp, w = event.ddp, self._state.window
        wrapper = self._models.wrapped(ddp)
        wrapper.in_forward, wrapper.elsewhere = True, False
        self._started.append(0.0)
        if not torch.is_grad_enabled():
            if self._state.checking and not ddp.module.training and len(w.eval_batch) < _MAX_EVAL_FORWARDS:
                w.eval_batch.append(fingerprint.combine(_digests(event.tensors, _BATCH_BYTES)))
            return
        location = None if ddp.require_backward_grad_sync else user_location()
        wrapper.begin_forward(ddp, in_no_sync=self._models.in_no_sync(ddp), location=location)
        for told in wrapper.settings.at_forward(ddp.module):
            self._announce(replace(told, step=self._state.next_step()), wrapper.index)
        if self._state.checking:
            w.modes = (w.modes or b"") + bytes([m.training for m in internals.modules(ddp.module)])
            w.rng = w.rng or rng_digest()
        if w.delivered:
            w.record.append(w.delivered)
            w.delivered = 0
        self._guard.run("probe:batch", self._look_at_batch, event.tensors)
        self._started[-1] = time.perf_counter()

    def _look_at_batch(self, tensors: Tensors) -> None:
        w = self._state.window
        for tensor in tensors():
            value, sampled = fingerprint.sampled_fingerprint(tensor, _BATCH_BYTES)
            w.batch.append(value)
            if sampled:
                w.flags |= Flag.BATCH_SAMPLED

    def _look_at_output(self, outputs: Tensors) -> None:
        self._state.window.output += _digests(outputs, _OUTPUT_BYTES)

    def end_forward(self, event: events.ForwardEnded) -> None:
        """Note the output of a DDP forward."""
        self._models.wrapped(event.ddp).in_forward = False
        started = self._started.pop() if self._started else 0.0
        w = self._state.window
        if not torch.is_grad_enabled() or started == 0.0:
            if len(w.eval_output) < len(w.eval_batch):
                w.eval_output.append(fingerprint.combine(_digests(event.outputs, _OUTPUT_BYTES)))
            return
        w.forward_seconds += time.perf_counter() - started
        if not self._state.checking:
            return
        self._guard.run("probe:output", self._look_at_output, event.outputs)
        if w.rng and rng_digest() != w.rng:
            w.flags |= Flag.RNG_USED_IN_FORWARD

    def _forward_fails(self, event: events.ForwardFailed) -> None:
        if (wrapper := self._state.wrapper_of(event.ddp)) is not None:
            wrapper.in_forward = False
        if self._started:
            self._started.pop()

    # --- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self, event: events.BackwardBegan) -> None:
        """Note the loss."""
        state, roots = self._state, event.roots
        state.in_backward += 1
        self._started.append(time.perf_counter())
        known = "probe:scaler" not in self._guard.off  # else nobody knows what the loss was multiplied with
        if known and len(roots) == state.in_backward == 1 and internals.is_plain(roots[0]) and roots[0].numel() == 1:
            read = loss_reader(roots[0].detach(), self._calls.take_scale())
            state.window.losses.append(read)
            self._bus.emit(events.LossGiven(roots[0], read))
        self._started[-1] = time.perf_counter()

    def _forget_backward(self) -> None:
        """Be outside of any backward: nobody sees the end of this one, or of a later one."""
        self._state.in_backward = 0
        self._started.clear()

    def _backward_fails(self, _: events.BackwardFailed) -> None:
        """Note that a backward has raised: which gradients came and which were reduced, nobody knows."""
        self._guard.cut()

    def end_backward(self, _: events.BackwardEnded) -> None:
        """Note what was reduced."""
        state = self._state
        if not state.in_backward:  # it was cut
            return
        started = self._started.pop() if self._started else time.perf_counter()
        state.in_backward -= 1
        if state.in_backward:
            return
        w = state.window
        w.backward_seconds += time.perf_counter() - started
        w.micro_batches += 1
        state.backwards += 1
        if state.backwards == _LONELY_BACKWARDS and not state.watches:
            self._bus.emit(events.NeverStepped())
        location: str | None = None
        for wrapper in state.wrappers:
            if not wrapper.arrived or wrapper.elsewhere or "probe:forward" in self._guard.off:
                continue  # without its forwards nothing is known of a wrapper, and it must not look bypassed
            if wrapper.forwards == 0 or not wrapper.armed:
                location = location or user_location()
            if wrapper.end_backward(location):
                state.syncs += 1
                if state.checking:
                    self._guard.run("probe:gradients", gradients.note_reduced, w, wrapper)
        if self._fused_stepped:
            self._finish_fused()

    # --- optimizer ----------------------------------------------------------------------------------------------------

    def pre_step(self, event: events.StepBegan) -> None:
        """Open the record of a step just before an optimizer changes anything."""
        optimizer = event.optimizer
        if self._stepping and id(optimizer) in self._stepping:
            self._stepping.clear()  # the previous step raised and never reached its post hook
        self._stepping.append(id(optimizer))
        if len(self._stepping) > 1:
            return
        if self._state.in_backward and "probe:backward" not in self._guard.off:  # its end is not seen then
            self._fuse(optimizer)
            return
        watch = self._watch(optimizer)
        if watch.given_up:
            return
        record = self._begin(watch)
        if event.closure:
            record.flags |= Flag.CLOSURE
        self._bus.emit(events.StepOpened(watch, record))
        if not event.closure:
            self._bus.emit(events.GradientsFinal(watch, record))
        if self._veto is not None and self._is_kept_from(self._veto, optimizer, watch, record):
            return
        self._pre = (watch, record, time.perf_counter())

    def _is_kept_from(
        self, veto: StepVeto, optimizer: torch.optim.Optimizer, watch: OptimizerWatch, record: StepRecord
    ) -> bool:
        """Let the ranks vote on the step; return True when the run ends here."""
        if record.flags & Flag.CLOSURE:
            veto.tell_unguarded()
            return False
        ends = bool(self._guard.run("probe:guard", veto.keeps_from, optimizer, watch, record))
        if ends:
            self._stepping.clear()
            self._finish(watch, record)
            self._halt = veto.error()
        return ends

    def post_step(self, event: events.StepEnded) -> None:
        """Close the record just after the step, and hand it over."""
        optimizer = event.optimizer
        if id(optimizer) not in self._stepping:
            return
        while self._stepping and self._stepping.pop() != id(optimizer):
            pass
        if self._stepping or self._pre is None or self._state.in_backward:
            return
        watch, record, started = self._pre
        self._pre = None
        record.fields["optimizer_seconds"] = time.perf_counter() - started
        if record.flags & Flag.CHECKED and record.flags & Flag.CLOSURE:
            self._bus.emit(events.GradientsFinal(watch, record))
        self._finish(watch, record)

    def _skipped(self, event: events.StepSkipped) -> None:
        """Note a step that GradScaler did not let happen; it counts as an attempt."""
        watch = self._watch(event.optimizer)
        if self._veto is not None:
            self._veto.abstain(watch)
        record = self._begin(watch)
        record.flags = (record.flags | Flag.SKIPPED) & ~Flag.CHECKED
        self._finish(watch, record)

    def _watch(self, optimizer: torch.optim.Optimizer) -> OptimizerWatch:
        watches = self._state.watches
        watch = self._by_optimizer.get(id(optimizer))
        if watch is None or (watch.ref is not None and watch.ref() is not optimizer):
            watch = OptimizerWatch(optimizer, index_of(optimizer, watches), self._entries, on_end=self._ended)
            watch.step = first_step(optimizer, watches)
            self._models.forget()
            watches.append(watch)
            self._by_optimizer[id(optimizer)] = watch
        watch.step = max(w.step for w in watches if w.index == watch.index)
        return watch

    def _ended(self, watch: OptimizerWatch) -> None:
        self._bus.emit(events.OptimizerEnded(watch))

    def end(self) -> None:
        """Tell that no optimizer steps any more."""
        for watch in self._state.watches:
            self._ended(watch)

    def _begin(self, watch: OptimizerWatch) -> StepRecord:
        state, run = self._state, self._guard.run
        if watch.refresh(state.wrappers):
            run("probe:gradients", self._hook, watch)
            if not any(watch.owned):
                self._bus.emit(events.ParametersUnwrapped(watch.params))
        flags = Flag.FIRST if watch.step == 0 else Flag(0)
        if (state.checking or self._due(watch.index, watch.step)) and not state.window.cut:
            flags |= Flag.CHECKED
        flags |= contract.flags(watch) | (Flag.LOCAL_ONLY if self._averaged else Flag(0))
        record = StepRecord(watch.index, watch.step, flags, state.window)
        record.names, record.owned = watch.names, watch.owned
        record.ids, record.slots = watch.ids, watch.slots
        record.hyper = run("probe:hyper", watch.hyper) or ()
        record.contract = contract.facts(watch, wrappers=len(state.wrappers), world=state.world)
        if (rate := run("probe:hyper", watch.lr)) is not None:
            record.fields["lr"] = rate
        record.fields["without_grad"] = sum(p.requires_grad and p.grad is None for p in watch.params)
        return record

    def _hook(self, watch: OptimizerWatch) -> None:
        for p, owner in zip(watch.params, watch.owners, strict=True):
            self._hooks.add(p, owner)

    def _finish(self, watch: OptimizerWatch, record: StepRecord) -> None:
        state = self._state
        self._bus.emit(events.StepClosing(watch, record))
        for wrapper in watch.wrappers:
            wrapper.pending = None
        record.fields |= self._numbers()
        record.loss_scale = self._calls.last_loss_scale
        self._bus.emit(events.StepClosed(watch, record))
        state.window.looks.let_go()
        self._hand_over(record)
        watch.step += 1
        state.window = Window(
            started=time.perf_counter(),
            overhead_before=self._guard.elapsed(),
            number=max(w.step for w in state.watches),
        )
        state.checking = any(self._due(w.index, w.step) for w in state.watches)

    def _numbers(self) -> dict[str, Any]:
        w = self._state.window
        return {
            "backwards": self._state.backwards,
            "syncs": self._state.syncs,
            "micro_batches": w.micro_batches,
            "step_seconds": time.perf_counter() - w.started,
            "data_seconds": w.data_seconds,
            "forward_seconds": w.forward_seconds,
            "backward_seconds": w.backward_seconds,
            "overhead_seconds": self._guard.elapsed() - w.overhead_before,
        }

    # --- optimizers that step inside backward -------------------------------------------------------------------------

    def _fuse(self, optimizer: torch.optim.Optimizer) -> None:
        if self._veto is not None:
            self._veto.tell_unguarded()
        if self._fused is None:
            watches = self._state.watches
            self._fused = OptimizerWatch(None, len({w.index for w in watches}), self._entries)
            watches.append(self._fused)
        if all(ref() is not optimizer for ref in self._fused.members):
            self._fused.members.append(weakref.ref(optimizer))
        self._fused_stepped = True

    def _finish_fused(self) -> None:
        self._fused_stepped = False
        assert self._fused is not None
        record = self._begin(self._fused)
        self._bus.emit(events.GradientsFinal(self._fused, record))
        self._finish(self._fused, record)


def _digests(tensors: Tensors, limit: int) -> list[int]:
    return [fingerprint.sampled_fingerprint(tensor, limit)[0] for tensor in tensors()]
