"""What is taken of gradients, state and frozen parameters at a checked optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.observations import Flag
from ddpdebug.probes import device, gradients
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.record import StepRecord, Window
from ddpdebug.probes.wrappers import Wrapper

_FROZEN_EVERY = 16


def note_gradients(window: Window, watch: OptimizerWatch, record: StepRecord) -> None:
    """Take fingerprints and checksums of the gradients as the optimizer finds them."""
    w = window
    record.grads, record.touched, record.touched_norms = gradients.digests_at_step(w, watch.params)
    pairs = zip(watch.names, watch.params, strict=True)
    record.missing = [n for n, p in pairs if p.grad is None and p.requires_grad]
    record.summed = [i for i, p in enumerate(watch.params) if id(p) in w.local]
    record.reduced_summed = [i for i, p in enumerate(watch.params) if id(p) in w.reduced]
    local = [w.local[id(watch.params[i])] for i in record.summed]
    reduced = [w.reduced[id(watch.params[i])] for i in record.reduced_summed]
    record.local = device.numbers([n for _, n in local] + [s for s, _ in local if s is not None])
    record.reduced = device.numbers([r.norm for r in reduced] + [r.sum for r in reduced if r.sum is not None])
    record.unsummed = frozenset(
        i for i in {*record.summed, *record.reduced_summed} if not w.is_summed(id(watch.params[i]))
    )


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
