"""What is taken of gradients, state and frozen parameters at a checked optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.probes import async_copy as device, gradients
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.record import StepRecord, Window
from ddpdebug.schema.row import Flag

_FROZEN_EVERY = 16


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


def note_frozen(
    watch: OptimizerWatch, record: StepRecord, watches: Sequence[OptimizerWatch], wrappers: Sequence[Wrapper]
) -> None:
    """Fingerprint DDP parameters that no optimizer steps, now and then: they should not change at all."""
    if watch.index or watch.step % _FROZEN_EVERY:
        return
    stepped = {id(p) for w in watches for p in w.params}
    frozen = [
        (n, p)
        for wrapper in wrappers
        if (module := wrapper.module()) is not None
        for n, p in internals.named_parameters(module)
        if id(p) not in stepped and n not in wrapper.ignored and not p.requires_grad
    ]
    if frozen:
        record.frozen_names, record.frozen = [n for n, _ in frozen], device.digests([p for _, p in frozen])
