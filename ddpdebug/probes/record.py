"""What the training thread noted in one optimizer step, and how it becomes the row. Short-lived, kept in a ring."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpdebug import fingerprint
from ddpdebug.probes.async_copy import Later, LaterFloats
from ddpdebug.probes.layer_statistics import LayerSamples
from ddpdebug.probes.step_state import Window
from ddpdebug.schema.details import Contract, Numerics, Replica
from ddpdebug.schema.row import CHECKSUM_SLOTS, Digest, Flag, Row


@dataclass(slots=True)
class StepRecord:
    """One optimizer step of this rank with everything that a detail request may ask for."""

    optimizer: int
    step: int
    flags: Flag
    window: Window
    names: Sequence[str] = ()
    owned: Sequence[bool] = ()
    ids: Sequence[int] = ()
    slots: Mapping[int, int] = field(default_factory=dict)
    grads: Later | None = None
    touched: Sequence[int] = ()  # positions whose gradients were changed after the reduction, or never reduced
    touched_norms: LaterFloats | None = None
    missing: Sequence[str] = ()
    before: Later | None = None
    after: Later | None = None
    before_glance: Later | None = None
    previous: Sequence[int] | None = None  # glances at what this rank's previous step left behind
    hyper: Sequence[Mapping[str, Any]] = ()
    state_keys: Sequence[tuple[str, str]] = ()
    state: Later | None = None
    state_plain: Sequence[tuple[str, str, int]] = ()
    frozen_names: Sequence[str] = ()
    frozen: Later | None = None
    replicas: Mapping[str, Replica] = field(default_factory=dict)
    contract: Contract = field(default_factory=Contract)
    local: LaterFloats | None = None  # norms of all of `summed`, then the sums that were taken
    summed: Sequence[int] = ()  # positions in `names`
    reduced: LaterFloats | None = None
    reduced_summed: Sequence[int] = ()
    unsummed: frozenset[int] = frozenset()  # positions whose gradients were normed but not summed in this step
    loss_scale: Callable[[], float] | None = None
    norms: LaterFloats | None = None  # with a tolerance: of the parameters after the step, then of the state tensors
    numerics: Numerics = field(default_factory=Numerics)
    numerics_later: Callable[[], Flag] | None = None  # completes it with what was still on a device
    holds: Callable[[], bool] | None = None  # of a last state: nothing has rewritten it since the step; may wait
    judged: bool = False  # the flags about gradients are certain: a norm that overflowed was confirmed or cleared
    layers: LayerSamples | None = None  # of a sampled step
    fields: dict[str, Any] = field(default_factory=dict)  # numbers that go into the row as they are
    row: Row | None = None

    def digest_table(self, later: Later | None) -> dict[str, int]:
        """Return name -> digest of one of the per-parameter lists."""
        if later is None:
            return {}
        return dict(zip(self.names, later(), strict=True))

    def gradient_norms(self) -> dict[str, float]:
        """Return the norms of the gradients as the optimizer used them, by parameter name, as far as they were read."""
        _, _, _, reduced = self.checksums()
        touched = self.touched_norms() if self.touched_norms is not None else []
        return {**reduced, **dict(zip((self.names[i] for i in self.touched), touched, strict=True))}

    def checksums(self) -> tuple[dict[str, float], dict[str, float], dict[str, float], dict[str, float]]:
        """Return local sums, local norms, reduced sums and reduced norms by parameter name."""
        tables: list[dict[str, float]] = []
        for later, positions in ((self.local, self.summed), (self.reduced, self.reduced_summed)):
            values = later() if later is not None else []
            names = [self.names[i] for i in positions]
            norms, sums = values[: len(names)], values[len(names) :]
            summed = [name for name, i in zip(names, positions, strict=True) if i not in self.unsummed]
            tables.append(dict(zip(summed, sums, strict=True)))
            tables.append(dict(zip(names, norms, strict=True)))
        return tables[0], tables[1], tables[2], tables[3]


def encode_row(record: StepRecord, rank: int) -> Row:
    """Build the row; runs in the background thread, where waiting for a device is allowed."""
    w = record.window
    fields = dict(record.fields)
    flags = record.flags | w.flags
    if record.loss_scale is not None:
        fields["loss_scale"] = record.loss_scale()
    losses = [read() for read in w.losses]
    if losses:
        fields["loss"] = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan
        if not math.isfinite(fields["loss"]):
            flags |= Flag.LOSS_NONFINITE
    fields |= _health_fields(record)
    if flags & Flag.CHECKED:
        flags |= _checked_fields(record, fields)
    if record.numerics_later is not None:
        flags |= record.numerics_later()
        record.numerics_later = None
    fields["hyper_digest"] = fingerprint.of_text(repr(record.hyper)) if record.hyper else 0
    fields["batch_digest"] = fingerprint.combine(w.batch) if w.batch else 0
    fields["record_digest"] = fingerprint.combine(w.record) if w.record else 0
    fields["output_digest"] = fingerprint.combine(w.output) if w.output else 0
    if len(w.eval_batch) == len(w.eval_output) > 0:
        fields["eval_batch_digest"] = fingerprint.combine(w.eval_batch)
        fields["eval_output_digest"] = fingerprint.combine(w.eval_output)
    fields["modes_digest"] = fingerprint.of_bytes(w.modes) if w.modes else 0
    fields["rng_digest"] = w.rng
    if w.clips:
        flags |= Flag.CLIPPED
        fields["clip_norm"], fields["clip_max"] = w.clips[-1].norm, w.clips[-1].max
        if any(clip.before_sync for clip in w.clips):
            flags |= Flag.CLIPPED_BEFORE_SYNC
    if w.loads:
        flags |= Flag.LOADED
    _freeze(record)
    record.row = Row(rank=rank, step=record.step, optimizer=record.optimizer, flags=int(flags), **fields)
    return record.row


def _health_fields(record: StepRecord) -> dict[str, float]:
    fields = {} if record.layers is None else record.layers.row()
    if losses := record.window.val_losses:
        fields["val_loss"] = math.fsum(read() for read in losses) / len(losses)
    return fields


def _freeze(record: StepRecord) -> None:
    """Keep numbers instead of tensors: a record stays in the ring for many steps, and has some per parameter."""
    for name in ("local", "reduced", "touched_norms", "norms"):
        later: LaterFloats | None = getattr(record, name)
        if later is not None:
            values = later()
            setattr(record, name, lambda values=values: values)
    record.window.local.clear()
    record.window.reduced.clear()


def _checked_fields(record: StepRecord, fields: dict[str, Any]) -> Flag:
    flags = Flag(0)
    if record.holds is not None and not record.holds():
        record.after = record.state = None
    if record.grads is not None:
        fields["grads_digest"], fields["foreign_grads_digest"] = _by_owner(record.grads(), record.owned)
        fields["presence_digest"] = fingerprint.of_text(",".join(record.missing) or "all")
    everyone = bool(record.flags & Flag.NO_DDP)
    for name, later in (("params_before_digest", record.before), ("params_after_digest", record.after)):
        if later is not None:
            own, foreign = _by_owner(later(), [True] * len(record.names) if everyone else record.owned)
            fields[name] = own
            if name == "params_after_digest":
                fields["foreign_params_digest"] = foreign
    if record.frozen is not None:
        fields["frozen_params_digest"] = _combined(record.frozen())
    if record.state is not None:
        plain = [digest for _, _, digest in record.state_plain]
        fields["state_digest"] = _combined(record.state() + plain)
    buffers = [digest for _, later in record.window.buffers for digest in later()]
    fields["buffers_digest"] = _combined(buffers)
    if record.previous is not None and record.before_glance and list(record.previous) != record.before_glance():
        flags |= Flag.PARAMS_CHANGED_OUTSIDE
    return flags | _checksum_fields(record, fields)


def _checksum_fields(record: StepRecord, fields: dict[str, Any]) -> Flag:
    flags = Flag(0)
    local_sums, local_norms, reduced_sums, reduced_norms = record.checksums()
    slot_of = {name: record.slots[key] for name, key in zip(record.names, record.ids, strict=True)}
    for slot in range(CHECKSUM_SLOTS):
        members = [name for name in local_norms if slot_of[name] == slot]
        fields[f"local_norm_{slot}"] = math.hypot(*(local_norms[n] for n in members)) if members else 0.0
        # Comparable only when both sides saw the same parameters: one that only other ranks used (a routed expert) was
        # reduced here without a share of this rank, and the other ranks count it.
        lent = any(norm for n, norm in reduced_norms.items() if slot_of[n] == slot and n not in local_norms)
        if not lent and all(n in local_sums and n in reduced_sums for n in members):
            fields[f"local_sum_{slot}"] = sum(local_sums[n] for n in members)
            fields[f"reduced_sum_{slot}"] = sum(reduced_sums[n] for n in members)
    if local_norms:
        fields["local_grad_norm"] = math.hypot(*local_norms.values())
        if not record.judged and not math.isfinite(fields["local_grad_norm"]):
            flags |= Flag.LOCAL_GRADS_NONFINITE
    if reduced_norms:
        fields["grad_norm"] = math.hypot(*reduced_norms.values())
        if not record.judged and not math.isfinite(fields["grad_norm"]):
            flags |= Flag.GRADS_NONFINITE
    return flags


def _combined(digests: Sequence[int]) -> Digest:
    return Digest(fingerprint.combine(digests) if digests else 0)


def _by_owner(digests: Sequence[int], owned: Sequence[bool]) -> tuple[Digest, Digest]:
    own = [d for d, is_owned in zip(digests, owned, strict=True) if is_owned]
    foreign = [d for d, is_owned in zip(digests, owned, strict=True) if not is_owned]
    return _combined(own), _combined(foreign)
