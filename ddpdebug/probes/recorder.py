"""The recorder of optimizer steps: opens a record as a step begins, closes it as it ends, and hands it over.

Here is what makes a step: which forwards and backwards belong to it, the loss, the batch's and the output's digests,
times and counts, and what the next step begins with. What else a record holds the other probes put into it, as they
hear of the events that this one emits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.errors import text_of
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes import contract, gradients, training_events as events
from ddpdebug.probes.async_copy import LaterOne, sampled as sample_later
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.gradient_hooks import GradientHooks
from ddpdebug.probes.loaders import RECORD_BYTES, Deliveries
from ddpdebug.probes.loop_calls import Adding, LoopCalls, Losses, StepCalls, kind_of
from ddpdebug.probes.model_copies import ModelCopies
from ddpdebug.probes.models import Models
from ddpdebug.probes.optimizers import GroupSettings, HandWatch, OptimizerWatch, first_step, index_of
from ddpdebug.probes.own_times import OwnTimes
from ddpdebug.probes.record import Part, SinceLastStep, StepRecord, combined
from ddpdebug.probes.sharding import Sharding, sharding_of, uncompared
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.step_veto import StepVeto
from ddpdebug.probes.training_events import Bus, Tensors
from ddpdebug.probes.training_loop.loss_graph import divisor, share
from ddpdebug.probes.values import loss_reader, rng_digest
from ddpdebug.schema.announcements import Announce, CutBackward, Dropped
from ddpdebug.schema.row import Flag

_OUTPUT_BYTES = 1 << 16
_MAX_EVAL_FORWARDS = 64
_BATCH_BYTES = 1 << 20
#: Tensors that loaders have delivered, whose digests are kept.
_MAX_DELIVERED = 64
#: So many backward passes without any optimizer step are looked into.
_LONELY_BACKWARDS = 8


@dataclass(slots=True)
class Forwards(Part, key="probe:forward"):
    """Digests of the inputs and outputs of DDP's forwards."""

    modes: dict[int, bytes] = field(default_factory=dict)  # of each DDP, train or eval of every module
    pending: dict[int, bytes] = field(default_factory=dict)  # likewise, of the newest forward: no backward has come
    rng: int = 0  # of the CPU's generator before the first one
    drawn: bool = False  # one of them has drawn from it
    batch: list[LaterOne] = field(default_factory=list)
    sampled: bool = False  # not all bytes of a batch were read
    output: list[LaterOne] = field(default_factory=list)
    eval_batch: list[list[LaterOne]] = field(default_factory=list)
    eval_output: list[list[LaterOne]] = field(default_factory=list)

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return the digests of modes, batches, outputs and random state."""
        flags = int(Flag.RNG_USED_IN_FORWARD) if self.drawn else 0
        found = {
            "modes_digest": fingerprint.of_bytes(b"".join(self.modes.values())) if self.modes else 0,
            "batch_digest": combined(_read(self.batch)),
            "output_digest": combined(_read(self.output)),
            "rng_digest": self.rng,
            "flags": flags | (int(Flag.BATCH_SAMPLED) if self.sampled else 0),
        }
        if len(self.eval_batch) == len(self.eval_output):
            found["eval_batch_digest"] = combined([fingerprint.combine(_read(one)) for one in self.eval_batch])
            found["eval_output_digest"] = combined([fingerprint.combine(_read(one)) for one in self.eval_output])
        return found

    def let_go(self) -> None:
        """Drop values that may still be on their way."""
        self.batch, self.output, self.eval_batch, self.eval_output = [], [], [], []


class Recorder:
    """The recorder of one rank.

    Args:
        models: finds the DDPs.
        hooks: sees the gradients of parameters that come later.
        calls: knows the loss scale.
        veto: may keep an optimizer from a step; None lets all of them step.
        hand_over: takes a finished record; must not block.
        announce: tells all ranks.
        due: tells for (optimizer, step) whether the sampled tier runs.
        watched: tells whether the step has a row.
        passed: is told (optimizer, step) of one that has none.
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
        watched: Callable[[int, int], bool],
        passed: Callable[[int, int], None],
    ) -> None:
        self._bus, self._state, self._guard, self._entries = bus, state, guard, entries_of(guard)
        self._models, self._hooks, self._calls, self._veto = models, hooks, calls, veto
        self._hand_over, self._announce, self.due, self._watched = hand_over, announce, due, watched
        self._passed = passed
        self._over: Callable[..., None] | None = None
        self._started: list[float] = []  # of the forwards and backwards that run
        self._adding = Adding()
        self._shares = 1  # losses that are given to backward are so many parts of one
        self._by_optimizer: dict[int, OptimizerWatch] = {}
        self._copies = ModelCopies(bus, state, self._entries.built)
        self._on_copy = False  # the step that runs is one of a copy of the model
        self._fused: OptimizerWatch | None = None
        self._fused_stepped = False
        self._stepping: list[int] = []
        self._gone: list[OptimizerWatch] = []  # ended, of parameters without a DDP
        self._now = state.clock.now
        self._pre: tuple[OptimizerWatch, StepRecord, float] | None = None
        self._hand: HandWatch | None = None
        self._hand_open: tuple[StepRecord, int | None] | None = None  # with what the parameters held then
        self._modules_seen = 0
        self._delivered: dict[int, int] = {}  # digest of a tensor that a loader has delivered -> that of its batch
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
        bus.on("probe:optimizer", events.GroupEnds, lambda _: self._tell_dropped())
        bus.on("probe:by-hand", events.BackwardEnded, self._open_by_hand)
        bus.on("probe:by-hand", events.ForwardBegan, self._close_by_hand)
        bus.on("probe:by-hand", events.ModuleForwardBegan, self._close_by_hand)
        bus.on("probe:batch", events.ModuleForwardBegan, self._module_forward)
        bus.on("probe:by-hand", events.GroupEnds, self._close_by_hand)
        bus.on("probe:wrapper", events.Averaged, self._averages)

    def take_halt(self) -> BaseException | None:
        """Return and clear the exception that the vote on the step that has just begun asks to raise."""
        halt, self._halt = self._halt, None
        return halt

    def cut(self) -> None:
        """Discard half-finished notes after a user's exception: this step is not judged."""
        state, number = self._state, self._state.since.number
        state.since = SinceLastStep(time.perf_counter(), self._guard.elapsed(), number, cut=True)
        self._stepping.clear()
        self._started.clear()
        self._pre, state.in_backward, self._fused_stepped = None, 0, False
        self._hand_open = None
        for wrapper in state.wrappers:
            wrapper.cut()

    def _averages(self, _: events.Averaged) -> None:
        self._state.averages = True

    # --- forward ------------------------------------------------------------------------------------------------------

    def begin_forward(self, event: events.ForwardBegan) -> None:
        """Record the inputs of a DDP forward, and whether its backward will be reduced."""
        ddp, since = event.ddp, self._state.since
        noted = since.parts[Forwards]
        wrapper = self._models.wrapped(ddp)
        wrapper.in_forward = True
        wrapper.elsewhere = wrapper.elsewhere and not torch.is_grad_enabled()
        self._started.append(0.0)
        if not torch.is_grad_enabled():
            if (
                self._state.checking
                and not internals.in_train_mode(ddp.module)
                and len(noted.eval_batch) < _MAX_EVAL_FORWARDS
            ):
                noted.eval_batch.append(_digests(event.tensors, _BATCH_BYTES))
            return
        location = None if internals.reduces_next(ddp) else user_location()
        wrapper.begin_forward(ddp, in_no_sync=self._models.in_no_sync(ddp), location=location)
        step = self._state.next_step()
        for told in self._guard.run("probe:constants", wrapper.settings.at_forward, ddp.module, step) or ():
            self._announce(replace(told, step=step), wrapper.index)
        if self._state.checking:
            noted.pending[wrapper.index] = bytes([internals.in_train_mode(m) for m in internals.modules(ddp.module)])
            noted.rng = noted.rng or rng_digest()
        self._guard.run("probe:batch", self._look_at_batch, event.tensors)
        self._started[-1] = self._now()

    def _module_forward(self, event: events.ModuleForwardBegan) -> None:
        """Note the inputs of a model that is sharded; of others nobody knows whether ranks should be fed alike."""
        if torch.is_grad_enabled() and self._state.is_sharded:
            self._look_at_batch(Tensors((event.args, event.kwargs)))

    def _look_at_batch(self, tensors: Tensors) -> None:
        noted = self._state.since.parts[Forwards]
        given: list[int] = []  # digests as a loader's tensors have them
        found, loaded = tensors(), bool(self._delivered) or Deliveries in self._state.since.parts
        for tensor in found:
            later, sampled = sample_later(tensor, _BATCH_BYTES)
            noted.batch.append(later)
            noted.sampled = noted.sampled or sampled
            if loaded and tensor.device.type == "cpu":
                small = tensor.layout is not torch.strided or tensor.nbytes <= RECORD_BYTES  # the others are read whole
                given.append(later() if small else fingerprint.sampled_fingerprint(tensor, RECORD_BYTES)[0])
        if found and loaded:
            self._note_record(given)

    def _note_record(self, given: list[int]) -> None:
        """Note which batch of a loader a forward is given: an older one where its tensors are not in the newest.

        A tensor that was changed on the way, or moved to a device, is taken for one of the newest batch.
        """
        deliveries = self._state.since.parts[Deliveries]
        fresh = deliveries.newest in {deliveries.tensors.get(value) for value in given}
        older = [self._delivered[value] for value in given if value in self._delivered]
        self._delivered |= deliveries.tensors
        while len(self._delivered) > _MAX_DELIVERED:
            del self._delivered[next(iter(self._delivered))]
        record = older[0] if older and not fresh else deliveries.newest
        if record:
            deliveries.fed.append(record)
        deliveries.newest = 0

    def _look_at_output(self, outputs: Tensors) -> None:
        self._state.since.parts[Forwards].output += _digests(outputs, _OUTPUT_BYTES)

    def end_forward(self, event: events.ForwardEnded) -> None:
        """Record the output of a DDP forward."""
        self._models.wrapped(event.ddp).in_forward = False
        started = self._started.pop() if self._started else 0.0
        since = self._state.since
        noted = since.parts[Forwards]
        if not torch.is_grad_enabled() or started == 0.0:
            if len(noted.eval_output) < len(noted.eval_batch):
                noted.eval_output.append(_digests(event.outputs, _OUTPUT_BYTES))
            return
        if not any(self._started):  # else it is inside of another one
            since.forward_seconds += self._now() - started
        if not self._state.checking:
            return
        self._guard.run("probe:output", self._look_at_output, event.outputs)
        if noted.rng and rng_digest() != noted.rng:
            noted.drawn = True

    def _forward_fails(self, event: events.ForwardFailed) -> None:
        if (wrapper := self._state.wrapper_of(event.ddp)) is not None:
            wrapper.in_forward = False
        if self._started:
            self._started.pop()

    # --- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self, event: events.BackwardBegan) -> None:
        """Record the loss."""
        state, roots = self._state, event.roots
        state.in_backward += 1
        state.reduced = state.reduced and state.in_backward > 1
        self._started.append(self._now())
        noted = state.since.parts[Forwards]  # a forward that no backward follows, of a look at outputs, does not train
        for index, modes in noted.pending.items():
            noted.modes[index] = noted.modes.get(index, b"") + modes
        noted.pending.clear()
        known = "probe:scaler" not in self._guard.off  # else nobody knows what the loss was multiplied with
        if known and len(roots) == state.in_backward == 1 and internals.is_plain(roots[0]) and roots[0].numel() == 1:
            scale = self._calls.take_scale()
            read = loss_reader(roots[0].detach(), scale)
            losses = state.since.parts[Losses]
            if not losses.given:
                losses.kind = self._guard.run("probe:losses", kind_of, roots[0]) or 0
            losses.given.append(read)
            losses.factor = losses.factor if scale is None else self._calls.last_loss_scale
            losses.divisors.append(self._guard.run("probe:losses", divisor, roots[0], by_scaler=scale is not None))
            losses.label_shares.append(self._guard.run("probe:losses", share, roots[0], by_scaler=scale is not None))
            self._bus.emit(events.LossGiven(roots[0], read))
        self._started[-1] = self._now()

    def _forget_backward(self) -> None:
        """Be outside of any backward: nobody sees the end of this one, or of a later one."""
        self._state.in_backward = 0
        self._started.clear()

    def _backward_fails(self, event: events.BackwardFailed) -> None:
        """Note that a backward has raised: which gradients came and which were reduced, nobody knows."""
        step = self._state.next_step()
        self._guard.cut()
        self._state.cut_short = CutBackward(error=text_of(event.error), step=step, location=user_location())

    def end_backward(self, _: events.BackwardEnded) -> None:
        """Record the reduction of gradients in a backward."""
        state = self._state
        if not state.in_backward:  # it was cut
            return
        started = self._started.pop() if self._started else self._now()
        state.in_backward -= 1
        if state.in_backward:
            return
        state.cut_short = None
        since, ended, syncs = state.since, self._now(), state.syncs
        since.backward_seconds += ended - started
        since.micro_batches += 1
        state.backwards += 1
        if state.backwards == _LONELY_BACKWARDS and not any([watch.step for watch in state.watches]):
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
                    self._guard.run("probe:gradients", gradients.note_reduced, since, wrapper)
        since.parts[OwnTimes].passed(started, ended, self._hooks.last_arrival, reduced=state.syncs > syncs)
        state.syncs = max(state.syncs, syncs + state.reduced)
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
        self._on_copy = self._guard.run("probe:copies", self._copies.trained_by, optimizer) is True
        if self._on_copy:
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
        self._pre = (watch, record, self._now() - _phases(record.since))

    def _is_kept_from(
        self, veto: StepVeto, optimizer: torch.optim.Optimizer, watch: OptimizerWatch, record: StepRecord
    ) -> bool:
        """Let the ranks vote on the step; return True when the run ends here."""
        if record.flags & Flag.CLOSURE:
            veto.tell_unguarded()
            return False
        self._state.clock.stop()
        ends = bool(self._guard.run("probe:guard", veto.keeps_from, optimizer, watch, record))
        self._state.clock.go_on()
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
        if self._stepping or self._state.in_backward:
            return
        if self._on_copy:
            self._leave_out()
        if self._pre is None:
            return
        watch, record, started = self._pre
        self._pre = None
        record.fields["optimizer_seconds"] = self._now() - _phases(record.since) - started
        if record.flags & Flag.CLOSURE:
            record.fields["without_grad"] = watch.without_gradient(glance=not record.checked)  # the closure made them
            if record.checked:
                self._bus.emit(events.GradientsFinal(watch, record))
        self._finish(watch, record)

    def _leave_out(self) -> None:
        """Forget the forwards and backwards of a copy's step: the model's own step has the time, not the contents.

        Validation losses are the model's, which is evaluated between its steps. Where it has forwards or backwards of
        its own for the coming step they are kept, with the losses of the copy.
        """
        since, self._on_copy = self._state.since, False
        if self._copies.model_runs():
            return
        fresh = SinceLastStep(since.started, since.overhead_before, since.number, cut=since.cut)
        if Losses in since.parts and (told := since.parts[Losses]).validation:
            noted = fresh.parts[Losses]
            noted.validation, noted.seen = told.validation, told.seen
        self._state.since = fresh

    def _skipped(self, event: events.StepSkipped) -> None:
        """Note a step that GradScaler did not let happen; it counts as an attempt."""
        watch = self._watch(event.optimizer)
        if self._veto is not None:
            self._veto.abstain(watch)
        record = self._begin(watch)
        record.flags |= Flag.SKIPPED
        record.checked = False
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
        if not watch.wrappers and self._state.world > 1:
            self._gone.append(watch)

    def _tell_dropped(self) -> None:
        """Announce which optimizers have gone with their parameters, while one whose gradients are reduced is alive."""
        stay = [w for w in self._state.watches if w.optimizers() and (w.wrappers or w.sharding is not None)]
        if not self._gone or not stay:
            return
        for watch in self._gone:
            watch.forget()  # else their memory is kept for a last look
        dropped = [watch for watch in self._gone if not watch.number()]
        self._gone = [watch for watch in self._gone if watch not in dropped]
        for watch in dropped:
            self._announce(Dropped(step=self._state.next_step()), watch.index)

    def end(self) -> None:
        """Announce that no optimizer steps any more."""
        self._tell_dropped()
        for watch in self._state.watches:
            self._ended(watch)

    def _begin(self, watch: OptimizerWatch) -> StepRecord:
        state, run = self._state, self._guard.run
        before = watch.ids
        if watch.refresh(state.wrappers, glance=not state.checking):
            run("probe:gradients", self._hook, watch)
            if not any(watch.owned):
                self._bus.emit(events.ParametersUnwrapped(watch.params))
            watch.sharding = run("probe:sharding", self._look_at_meshes, watch, before)
        if self._gone and (watch.wrappers or watch.sharding is not None):
            self._tell_dropped()
        flags = Flag.FIRST if watch.step == 0 else Flag(0)
        flags |= Flag.SHARDED if watch.sharding is not None else Flag(0)
        flags |= contract.flags(watch) | (Flag.LOCAL_ONLY if self._state.averages else Flag(0))
        record = StepRecord(
            watch.index,
            watch.step,
            flags,
            state.since,
            checked=(state.checking or self.due(watch.index, watch.step)) and not state.since.cut,
            names=watch.names if watch.sharding is None else watch.sharding.names,
            owned=watch.owned,
            sharding=watch.sharding,
            ids=watch.ids,
            slots=watch.slots,
            contract=contract.facts(watch, wrappers=len(state.wrappers), world=state.world),
        )
        if (settings := run("probe:hyper", watch.settings)) is not None:
            record.parts[GroupSettings] = settings
        record.fields["without_grad"] = watch.without_gradient(glance=not record.checked)
        return record

    def _look_at_meshes(self, watch: OptimizerWatch, before: Sequence[int]) -> Sharding | None:
        """Find out which ranks share what, and announce it; `before` are the ids of what it has stepped."""
        first = watch.step == 0 or {*before}.isdisjoint(watch.ids)
        found = sharding_of(watch.names, watch.params, watch.owned, self._state.world, first=first)
        if found is None:
            known = watch.is_loose and any([other.sharding is not None for other in self._state.watches])
            return uncompared(watch.names) if known else None
        averages, along = internals.ranks_of_averages(self._state.models())
        beside = tuple([group for group in internals.groups_beside() if group not in along])
        found = replace(found, place=replace(found.place, averages=averages, beside=beside))
        if watch.sharding is None or watch.sharding.place != found.place:
            self._announce(found.place, watch.index)
        return found

    def _hook(self, watch: OptimizerWatch) -> None:
        for p, owner in zip(watch.params, watch.owners, strict=True):
            self._hooks.add(p, owner)

    def _finish(self, watch: OptimizerWatch, record: StepRecord) -> None:
        state = self._state
        self._bus.emit(events.StepClosing(watch, record))
        record.fields |= self._numbers()
        losses = state.since.parts[Losses]
        self._shares = losses.settle(self._shares)  # not before: with a closure, the step runs the last backward
        losses.scale, losses.adding = self._calls.last_loss_scale, self._adding
        self._bus.emit(events.StepClosed(watch, record))
        has_row, alone, state.alone = not state.passes and self._watched(watch.index, watch.step), state.alone, False
        if not has_row:
            state.syncs = state.synced  # the other ranks have not counted what this one has looked at
        if alone and not has_row:
            record.flags |= Flag.ALONE
            has_row = True
        if has_row:
            self._hand_over(record)
            watch.told = record.step
        step, since = self.count(watch), state.since
        state.since = SinceLastStep(time.perf_counter(), self._guard.elapsed(), state.next_step())
        state.synced = state.syncs
        self.prepare()
        if not has_row:
            keep_for_next(since, state.since)
            self._passed(watch.index, step)
        if self._over is not None:
            self._over(watch.index)

    def prepare(self, *, partly: bool = False) -> None:
        """Prepare for the coming step: whether it is checked, and what the check needs.

        Args:
            partly: some of it has passed already, so that it is not.
        """
        due = [self.due(watch.index, watch.step) for watch in self._state.newest()]
        self._state.checking = any(due) and not partly
        self._guard.run("probe:gradients", self._hooks.switch)

    # --- steps that are not watched -----------------------------------------------------------------------------------

    def when_over(self, call: Callable[..., None]) -> None:
        """Set the function that is called with the optimizer's number when a step is over."""
        self._over = call

    def known(self, optimizer: torch.optim.Optimizer) -> OptimizerWatch | None:
        """Return the watch of an optimizer that has stepped before; None if it is not watched."""
        watch = self._by_optimizer.get(id(optimizer))
        return watch if watch is not None and watch.ref is not None and watch.ref() is optimizer else None

    def may_pass(self) -> bool:
        """Return whether a step may go unwatched: not if only the events in between show that there is a step."""
        hidden = self._fused is not None or self._hand is not None or self._veto is not None
        return not (hidden or self._stepping or any([watch.given_up for watch in self._state.watches]))

    @staticmethod
    def count(watch: OptimizerWatch) -> int:
        """Count a step; return its number."""
        watch.step += 1
        return watch.step - 1

    def _numbers(self) -> dict[str, Any]:
        since = self._state.since
        return {
            "backwards": self._state.backwards,
            "syncs": self._state.syncs,
            "micro_batches": since.micro_batches,
            "step_seconds": time.perf_counter() - since.started,
            "data_seconds": since.data_seconds,
            "forward_seconds": since.forward_seconds,
            "backward_seconds": since.backward_seconds,
            "overhead_seconds": self._guard.elapsed() - since.overhead_before,
        }

    # --- optimizers that step inside backward -------------------------------------------------------------------------

    def _fuse(self, optimizer: torch.optim.Optimizer) -> None:
        if self._veto is not None:
            self._veto.tell_unguarded()
        if self._fused is None:
            watches = self._state.watches
            self._fused = OptimizerWatch(None, len({w.index for w in watches}), self._entries)
            watches.append(self._fused)
        if all([ref() is not optimizer for ref in self._fused.members]):
            self._fused.members.append(weakref.ref(optimizer))
        self._fused_stepped = True

    def _finish_fused(self) -> None:
        self._fused_stepped = False
        assert self._fused is not None
        record = self._begin(self._fused)
        self._bus.emit(events.GradientsFinal(self._fused, record))
        self._finish(self._fused, record)

    # --- updates by hand ----------------------------------------------------------------------------------------------

    @property
    def by_hand(self) -> int:
        """The number of updates by hand that were seen."""
        return 0 if self._hand is None else self._hand.step

    def end_by_hand(self) -> None:
        """Close the record of the last update by hand; to be called before the consumers of records are closed."""
        self._guard.run("probe:by-hand", self._close_by_hand, None)

    def _open_by_hand(self, _: events.BackwardEnded) -> None:
        """Open the record of an update that the script may make now; an earlier one was not followed by any."""
        state, built = self._state, self._entries.built
        if state.in_backward or built.optimizers or any([watch is not self._hand for watch in state.watches]):
            self._hand_open = None
            return
        if self._modules_seen != built.modules_seen:
            self._modules_seen = built.modules_seen
            models = [m for m in built.outermost() if any([p.grad is not None for p in internals.parameters(m)])]
            if not models:
                return
            if self._hand is None:
                self._hand = HandWatch(0, self._entries)
                state.watches.append(self._hand)
            self._hand.take([m.module if isinstance(m, DistributedDataParallel) else m for m in models])
        if (watch := self._hand) is None:
            return
        record = self._begin(watch)
        # without a DDP the script has its gradients reduced later, if at all
        watch.has_raw_gradients, watch.has_gradients = True, state.world == 1 or all(watch.owned)
        self._bus.emit(events.GradientsFinal(watch, record))
        self._hand_open = record, watch.contents()

    def _close_by_hand(self, event: events.ForwardBegan | events.ModuleForwardBegan | events.GroupEnds | None) -> None:
        """Close the record where the parameters have changed since: as the next forward with gradients begins."""
        forward = isinstance(event, events.ForwardBegan | events.ModuleForwardBegan)
        if self._hand_open is None or self._hand is None or (forward and not torch.is_grad_enabled()):
            return
        record, contents = self._hand_open
        if contents is not None and self._hand.contents() in {None, contents}:
            return  # gradients are added up, nothing is trained, or the models are gone
        self._hand_open = None
        self._state.by_hand = True
        self._finish(self._hand, record)


def keep_for_next(since: SinceLastStep, following: SinceLastStep) -> None:
    """Keep notes that no later step would show, of a step without a row: losses of an evaluation, loads."""
    if not since.parts:
        return
    if Losses in since.parts and (told := since.parts[Losses]).validation:
        noted = following.parts[Losses]
        noted.validation, noted.seen = told.validation, told.seen
    if StepCalls in since.parts and (loads := since.parts[StepCalls].loads):
        following.parts[StepCalls].loads = loads


def _phases(since: SinceLastStep) -> float:
    """Return the seconds of other phases, which a closure of the optimizer runs inside of its step."""
    return since.data_seconds + since.forward_seconds + since.backward_seconds


def _digests(tensors: Tensors, limit: int) -> list[LaterOne]:
    return [sample_later(tensor, limit)[0] for tensor in tensors()]


def _read(digests: Sequence[LaterOne]) -> list[int]:
    return [read() for read in digests]
