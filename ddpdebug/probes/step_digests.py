"""Digests of gradients, parameters, optimizer state and frozen parameters at a checked optimizer step."""

from __future__ import annotations

import torch

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import async_copy as device, gradients
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.step_state import StepState, Window
from ddpdebug.probes.training_events import Bus, GradientsFinal, StateRead, StepClosing, StepOpened
from ddpdebug.schema.row import Flag

_FROZEN_EVERY = 16


class StepDigests:
    """Takes them, each kind under a part of its own.

    Args:
        want_norms: a comparison with a tolerance needs numbers, not digests.
    """

    def __init__(self, bus: Bus, state: StepState, guard: Guard, *, want_norms: bool = False) -> None:
        self._bus, self._state, self._run = bus, state, guard.run
        bus.on("probe:parameters", StepOpened, self._parameters_before)
        bus.on("probe:state", StepOpened, self._state_before)
        bus.on("probe:step-gradients", GradientsFinal, self._gradients)
        bus.on("probe:parameters", StepClosing, self._parameters_after)
        bus.on("probe:state", StepClosing, self._state_after)
        bus.on("probe:frozen", StepClosing, self._frozen)
        if want_norms:
            bus.on("probe:parameters", StateRead, self._norms)

    @staticmethod
    def _parameters_before(event: StepOpened) -> None:
        if event.record.flags & Flag.CHECKED:
            note_before(event.watch, event.record)

    @staticmethod
    def _state_before(event: StepOpened) -> None:
        if event.record.flags & Flag.CHECKED:
            note_small_state(event.watch, event.record)

    def _gradients(self, event: GradientsFinal) -> None:
        inside_backward = event.watch.ref is None  # such optimizers have used and cleared them
        if event.record.flags & Flag.CHECKED and not inside_backward:
            note_gradients(self._state.window, event.watch, event.record)

    @staticmethod
    def _parameters_after(event: StepClosing) -> None:
        if event.record.flags & Flag.CHECKED:
            note_after(event.watch, event.record)

    def _state_after(self, event: StepClosing) -> None:
        if event.record.flags & Flag.CHECKED:
            keys, tensors = note_state(event.watch, event.record)
            self._bus.emit(StateRead(event.watch, event.record, keys, tensors))

    @staticmethod
    def _norms(event: StateRead) -> None:
        norms = [gradients.norm_of(t) for t in (*event.watch.params, *event.tensors)]
        event.record.norms = device.numbers(norms)

    def _frozen(self, event: StepClosing) -> None:
        if event.record.flags & Flag.CHECKED:
            note_frozen(event.watch, event.record, self._state)


def note_gradients(window: Window, watch: OptimizerWatch, record: StepRecord) -> None:
    """Take fingerprints and checksums of the gradients as the optimizer finds them: all or, if that fails, none."""
    w = window
    digests = gradients.digests_at_step(w, watch.params)
    pairs = zip(watch.names, watch.params, strict=True)
    missing = [n for n, p in pairs if p.grad is None and p.requires_grad]
    summed = [i for i, p in enumerate(watch.params) if id(p) in w.local]
    reduced_summed = [i for i, p in enumerate(watch.params) if id(p) in w.reduced]
    local = [w.local[id(watch.params[i])] for i in summed]
    reduced = [w.reduced[id(watch.params[i])] for i in reduced_summed]
    local_numbers = device.numbers([n for _, n in local] + [s for s, _ in local if s is not None])
    reduced_numbers = device.numbers([r.norm for r in reduced] + [r.sum for r in reduced if r.sum is not None])
    unsummed = frozenset(i for i in {*summed, *reduced_summed} if not w.is_summed(id(watch.params[i])))
    record.grads, record.touched, record.touched_norms = digests
    record.missing, record.summed, record.reduced_summed, record.unsummed = missing, summed, reduced_summed, unsummed
    record.local, record.reduced = local_numbers, reduced_numbers


def note_before(watch: OptimizerWatch, record: StepRecord) -> None:
    """Take fingerprints of the parameters that the optimizer is about to change."""
    record.before = device.digests(watch.params)
    if watch.after is not None and watch.after_step == watch.step - 1:
        record.previous, record.before_glance = watch.after, device.glances(watch.params)


def note_after(watch: OptimizerWatch, record: StepRecord) -> None:
    """Take fingerprints of the parameters that the step has left behind."""
    glances = device.glances(watch.params)
    record.after = glances or device.digests(watch.params)
    watch.after, watch.after_step = None if glances is None else glances(), watch.step


def note_state(watch: OptimizerWatch, record: StepRecord) -> tuple[list[tuple[str, str]], list[torch.Tensor]]:
    """Take fingerprints of the optimizer's state, and return its tensors with their (name, key)."""
    keys, tensors, plain = watch.state()
    later = device.digests(tensors)
    here = watch.after is not None and watch.after_step == watch.step and watch.state_is_small
    state = later() + [d for _, _, d in plain] if here else []
    watch.state_after = fingerprint.combine(state) if state else 0
    record.state_keys, record.state, record.state_plain = keys, later, plain
    return keys, tensors


def note_small_state(watch: OptimizerWatch, record: StepRecord) -> None:
    """Flag a state that is not the one that this rank's last step left behind."""
    if not watch.state_after or watch.after_step != watch.step - 1:
        return
    _, tensors, plain = watch.state()
    before = device.digests(tensors)() + [digest for _, _, digest in plain]
    if (fingerprint.combine(before) if before else 0) != watch.state_after:
        record.flags |= Flag.STATE_CHANGED_OUTSIDE


def note_frozen(watch: OptimizerWatch, record: StepRecord, state: StepState) -> None:
    """Fingerprint DDP parameters that no optimizer steps, now and then: they should not change at all."""
    if watch.index or watch.step % _FROZEN_EVERY:
        return
    stepped = {id(p) for w in state.watches for p in w.params}
    frozen = [
        (n, p)
        for wrapper in state.wrappers
        if (module := wrapper.module()) is not None
        for n, p in internals.named_parameters(module)
        if id(p) not in stepped and n not in wrapper.ignored and not p.requires_grad
    ]
    if frozen:
        record.frozen_names, record.frozen = [n for n, _ in frozen], device.digests([p for _, p in frozen])
