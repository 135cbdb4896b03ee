"""Digests of gradients, parameters, optimizer state and frozen parameters at a checked optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.probes import async_copy as device, gradients
from ddpdebug.probes.gradients import GradientSums
from ddpdebug.probes.loop_calls import Losses, StepCalls
from ddpdebug.probes.nonfinite_notes import Judgement
from ddpdebug.probes.record import Part, StepRecord, combined
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import (
    BackwardEnded,
    Bus,
    ForwardBegan,
    GradientsFinal,
    ModuleForwardBegan,
    StateRead,
    StepClosing,
    StepOpened,
)
from ddpdebug.schema.row import CHECKSUM_SLOTS, Flag

_FROZEN_EVERY = 16
#: Two factors that differ by rounding in 16 bits, and by what clipping adds to a norm.
_ALIKE = 0.02


@dataclass(slots=True)
class GradientDigests(Part, key="probe:step-gradients"):
    """Digests of the gradients at the optimizer step, and checksums before and after the reduction: all or none."""

    names: Sequence[str] = ()  # of the optimizer's parameters
    digests: device.Later | None = None
    touched: Sequence[int] = ()  # positions whose gradients were changed after the reduction, or never reduced
    touched_norms: device.LaterFloats = list
    missing: Sequence[str] = ()
    summed: Sequence[int] = ()  # positions in `names`
    local: device.LaterFloats = list  # norms of all of `summed`, then the sums that were taken
    reduced_summed: Sequence[int] = ()
    reduced: device.LaterFloats = list
    unsummed: frozenset[int] = frozenset()  # positions whose gradients were normed but not summed in this step
    alone: Sequence[int] = ()  # positions of parts that no other rank has, where clipping is looked into
    alone_norms: device.LaterFloats = list
    present: Sequence[int] = ()  # positions that have a gradient, likewise
    clipped_all: bool = False  # clipping was given just these

    def table(self) -> dict[str, int]:
        """Return the gradients' digests by parameter name."""
        return {} if self.digests is None else dict(zip(self.names, self.digests(), strict=True))

    def norms(self) -> dict[str, float]:
        """Return the norms of the gradients at the optimizer step, by parameter name, as far as they were read."""
        _, _, _, reduced = self.checksums()
        return {**reduced, **dict(zip((self.names[i] for i in self.touched), self.touched_norms(), strict=True))}

    def checksums(self) -> tuple[dict[str, float], dict[str, float], dict[str, float], dict[str, float]]:
        """Return local sums, local norms, reduced sums and reduced norms by parameter name."""
        tables: list[dict[str, float]] = []
        for later, positions in ((self.local, self.summed), (self.reduced, self.reduced_summed)):
            values = later()
            names = [self.names[i] for i in positions]
            norms, sums = values[: len(names)], values[len(names) :]
            summed = [name for name, i in zip(names, positions, strict=True) if i not in self.unsummed]
            tables.append(dict(zip(summed, sums, strict=True)))
            tables.append(dict(zip(names, norms, strict=True)))
        return tables[0], tables[1], tables[2], tables[3]

    def columns(self, record: StepRecord) -> dict[str, Any]:
        """Return digests by owner, checksums by slot and norms."""
        if not record.checked:
            return {}
        fields: dict[str, Any] = {}
        if self.digests is not None and record.sharding is not None:
            fields["grads_digest"], _ = _by_owner(self.digests(), record.owned)
            fields |= record.sharding.columns("grads", list(enumerate(self.digests())))
        elif self.digests is not None:
            fields["grads_digest"], fields["foreign_grads_digest"] = _by_owner(self.digests(), record.owned)
        if self.digests is not None:
            fields["presence_digest"] = fingerprint.of_text(",".join(self.missing) or "all")
        local_sums, local_norms, reduced_sums, reduced_norms = self.checksums()
        slot_of = {name: record.slots[key] for name, key in zip(record.names, record.ids, strict=True)}
        for slot in range(CHECKSUM_SLOTS) if record.sharding is None else ():
            members = [name for name in local_norms if slot_of[name] == slot]
            fields[f"local_norm_{slot}"] = math.hypot(*(local_norms[n] for n in members)) if members else 0.0
            # Comparable only when both sides saw the same parameters: one that only other ranks used (a routed expert)
            # was reduced here without a share of this rank, and the other ranks count it.
            lent = any([norm for n, norm in reduced_norms.items() if slot_of[n] == slot and n not in local_norms])
            if not lent and all([n in local_sums and n in reduced_sums for n in members]):
                fields[f"local_sum_{slot}"] = sum(local_sums[n] for n in members)
                fields[f"reduced_sum_{slot}"] = sum(reduced_sums[n] for n in members)
        judgement, factor = record.parts.get(Judgement), self._factor(record, reduced_norms)
        flags, certain = 0, judgement is not None and judgement.certain
        for name, norms, flag in (
            ("local_grad_norm", local_norms, Flag.LOCAL_GRADS_NONFINITE),
            ("grad_norm", reduced_norms, Flag.GRADS_NONFINITE),
        ):
            if norms:
                fields[name] = math.hypot(*norms.values()) / factor
                flags |= 0 if certain or math.isfinite(fields[name]) else int(flag)
        calls = record.since.parts.get(StepCalls)
        if self.present and record.sharding is not None and calls is not None and calls.goes_by_one():
            positions, found = [*self.touched, *self.alone], [*self.touched_norms(), *self.alone_norms()]
            fields |= record.sharding.norms(dict(zip(positions, found, strict=True)), self.present)
            flags |= int(Flag.CLIPPED_ALL) if self.clipped_all else 0
        return {**fields, "flags": flags}

    def _factor(self, record: StepRecord, reduced: Mapping[str, float]) -> float:
        """Return the loss scale that the gradients carried in backward, 1 where none is known.

        That of GradScaler; or what the script has multiplied its loss with, where it has divided all gradients by the
        same again, beside clipping.
        """
        losses, calls = record.since.parts.get(Losses), record.since.parts.get(StepCalls)
        if losses is not None and losses.factor is not None:
            found = losses.factor()
            return found if math.isfinite(found) and found > 0 else 1.0
        divisors = set() if losses is None else {*losses.divisors}
        own = divisors.pop() if len(divisors) == 1 else None
        if own is None or not 0 < own < 1:
            return 1.0
        cut = 1.0
        for clip in () if calls is None else calls.clips:
            cut *= min(1.0, clip.max / clip.norm) if clip.norm > 0 else 1.0
        left = dict(zip((self.names[i] for i in self.touched), self.touched_norms(), strict=True))
        shares = [left.get(name, norm) / norm for name, norm in reduced.items() if math.isfinite(norm) and norm > 0]
        alike = bool(shares) and all([math.isclose(share, own * cut, rel_tol=_ALIKE) for share in shares])
        return 1 / own if alike else 1.0

    def let_go(self) -> None:
        """Keep numbers instead of tensors."""
        local, reduced, touched = self.local(), self.reduced(), self.touched_norms()
        self.local, self.reduced, self.touched_norms = lambda: local, lambda: reduced, lambda: touched
        alone = self.alone_norms()
        self.alone_norms = lambda: alone


@dataclass(slots=True)
class ParameterDigests(Part, key="probe:parameters"):
    """Digests of the parameters just before and just after the step, in the order of the record's names."""

    before: device.Later | None = None
    after: device.Later | None = None
    glances: device.Later | None = None  # before the step
    previous: Sequence[int] | None = None  # glances at what this rank's previous step left behind
    norms: device.LaterFloats = list  # with a tolerance: of the parameters after the step, then of the state tensors
    holds: Callable[[], bool] | None = None  # of a last state: nothing has rewritten it since the step; may wait

    def changed_outside(self) -> bool:
        """Return whether the parameters have changed since this rank's previous step."""
        if self.previous is None or self.glances is None:
            return False
        return list(self.previous) != self.glances()

    def columns(self, record: StepRecord) -> dict[str, Any]:
        """Return digests by owner."""
        if not record.checked:
            return {}
        fields: dict[str, Any] = {"flags": int(Flag.PARAMS_CHANGED_OUTSIDE) if self.changed_outside() else 0}
        everything = record.flags & Flag.NO_DDP and record.sharding is None
        owned = [True] * len(record.names) if everything else record.owned
        if self.before is not None:
            fields["params_before_digest"], _ = _by_owner(self.before(), owned)
        if self.holds is not None and not self.holds():
            self.after = None
        if self.after is not None and record.sharding is not None:
            fields["params_after_digest"], _ = _by_owner(self.after(), owned)
            fields |= record.sharding.columns("params", list(enumerate(self.after())))
        elif self.after is not None:
            fields["params_after_digest"], fields["foreign_params_digest"] = _by_owner(self.after(), owned)
        return fields

    def let_go(self) -> None:
        """Keep numbers instead of tensors."""
        norms = self.norms()
        self.norms = lambda: norms


@dataclass(slots=True)
class StateDigests(Part, key="probe:state"):
    """Digests of the optimizer's state after the step, or of this step's share of it."""

    keys: Sequence[tuple[str, str]] = ()  # (parameter, key) of the tensors
    tensors: device.Later | None = None
    plain: Sequence[tuple[str, str, int]] = ()  # (parameter, key, digest) of the other values
    holds: Callable[[], bool] | None = None  # as that of the parameters

    def columns(self, record: StepRecord) -> dict[str, Any]:
        """Return one digest of the whole state."""
        if self.holds is not None and not self.holds():
            self.tensors = None
        if not record.checked or self.tensors is None:
            return {}
        if record.sharding is None:
            return {"state_digest": combined(self.tensors() + [digest for _, _, digest in self.plain])}
        position = {name: i for i, name in enumerate(record.names)}
        found = [(position[name], value) for (name, _), value in zip(self.keys, self.tensors(), strict=True)]
        found += [(position[name], value) for name, _, value in self.plain]
        counts = {i for i, (_, key) in enumerate([*self.keys, *(row[:2] for row in self.plain)]) if key == "step"}
        slots = record.sharding.slots  # of what is this rank's alone only the count of steps is the others' too
        own = combined([v for n, (i, v) in enumerate(found) if record.owned[i] or (slots[i] is None and n in counts)])
        return {"state_digest": own, **record.sharding.columns("state", found)}


@dataclass(slots=True)
class FrozenDigests(Part, key="probe:frozen"):
    """Digests of DDP parameters that no optimizer steps."""

    names: Sequence[str] = ()
    digests: device.Later = list

    def columns(self, record: StepRecord) -> dict[str, Any]:
        """Return one digest of all of these parameters."""
        return {"frozen_params_digest": combined(self.digests())} if record.checked else {}


class StepDigests:
    """The probe that takes these digests, each kind under a part of its own.

    Args:
        want_norms: a comparison with a tolerance needs numbers, not digests.
    """

    def __init__(self, bus: Bus, state: StepState, *, want_norms: bool = False) -> None:
        self._bus, self._state = bus, state
        #: A step whose closure has not run a backward yet, with what tells that its optimizer has changed parameters.
        self._closure: tuple[StepOpened, list[int | None]] | None = None
        bus.on("probe:parameters", StepOpened, self._parameters_before)
        bus.on("probe:parameters", ForwardBegan, self._forward_in_closure)
        bus.on("probe:parameters", ModuleForwardBegan, self._forward_in_closure)
        bus.on("probe:parameters", BackwardEnded, self._parameters_in_closure)
        bus.on("probe:state", StepOpened, self._state_before)
        bus.on("probe:step-gradients", GradientsFinal, self._gradients)
        bus.on("probe:parameters", StepClosing, self._parameters_after)
        bus.on("probe:state", StepClosing, self._state_after)
        bus.on("probe:frozen", StepClosing, self._frozen)
        if want_norms:
            bus.on("probe:parameters", StateRead, self._norms)

    def cut(self) -> None:
        """Discard the notes of a closure that has raised."""
        self._closure = None

    def _parameters_before(self, event: StepOpened) -> None:
        """Take fingerprints of the parameters that the optimizer is about to change."""
        watch, record = event.watch, event.record
        if not record.checked:
            return
        self._closure = (event, _signs(watch.params)) if record.flags & Flag.CLOSURE else None
        self._take_before(event)

    @staticmethod
    def _take_before(event: StepOpened) -> None:
        watch = event.watch
        part = event.record.parts[ParameterDigests]
        if watch.after is not None and watch.after_step == watch.step - 1:
            part.previous = watch.after
            part.before, part.glances = device.digests_and_glances(watch.readable())
        else:
            part.before = device.digests(watch.readable())

    def _forward_in_closure(self, _: ForwardBegan | ModuleForwardBegan) -> None:
        """Let the first reading stand where the optimizer has changed parameters ahead of its closure (SAM)."""
        if self._closure is not None and _signs(self._closure[0].watch.params) != self._closure[1]:
            self._closure = None

    def _parameters_in_closure(self, _: BackwardEnded) -> None:
        """Take them once more: what a closure's own forward has changed is not the optimizer's doing."""
        pending, self._closure = self._closure, None
        if pending is not None:
            self._take_before(pending[0])

    @staticmethod
    def _state_before(event: StepOpened) -> None:
        """Flag a state that is not the one that this rank's last step left behind."""
        watch, record = event.watch, event.record
        if not record.checked or not watch.state_after or watch.after_step != watch.step - 1:
            return
        _, tensors, plain = watch.state()
        if combined(device.digests(tensors)() + [digest for _, _, digest in plain]) != watch.state_after:
            record.flags |= Flag.STATE_CHANGED_OUTSIDE

    @staticmethod
    def _gradients(event: GradientsFinal) -> None:
        """Take fingerprints and checksums of the gradients as the optimizer finds them."""
        watch, record = event.watch, event.record
        if not record.checked:
            return
        if not watch.has_gradients:  # optimizers inside backward have used and cleared them
            record.parts[GradientDigests] = GradientDigests()
            return
        sums = record.since.parts[GradientSums]
        sharding = watch.sharding
        read = [p.grad for p in watch.params] if sharding is None else sharding.readable_gradients(watch.params)
        digests, touched, touched_norms = gradients.digests_at_step(sums, watch.params, read)
        pairs = zip(watch.names, watch.params, strict=True)
        calls = record.since.parts.get(StepCalls)
        clipped = calls is not None and calls.euclidean and sharding is not None
        present = [i for i, p in enumerate(watch.params) if p.grad is not None] if clipped else []
        alone = sharding.alone(watch.params) if sharding is not None and clipped else []
        summed = [i for i, p in enumerate(watch.params) if id(p) in sums.local]
        reduced_summed = [i for i, p in enumerate(watch.params) if id(p) in sums.reduced]
        local = [sums.local[id(watch.params[i])] for i in summed]
        reduced = [sums.reduced[id(watch.params[i])] for i in reduced_summed]
        ours = [n for _, n in local] + [s for s, _ in local if s is not None]
        theirs = [r.norm for r in reduced] + [r.sum for r in reduced if r.sum is not None]
        count, read_both = len(ours), device.numbers([*ours, *theirs])  # one copy, where they are on a device
        record.parts[GradientDigests] = GradientDigests(
            names=record.names,
            digests=digests,
            touched=touched,
            touched_norms=touched_norms,
            # what had one in backward lost it on purpose, as a layer that rests for a while
            missing=[n for n, p in pairs if p.grad is None and p.requires_grad and id(p) not in sums.local],
            summed=summed,
            local=lambda: read_both()[:count],
            reduced_summed=reduced_summed,
            reduced=lambda: read_both()[count:],
            alone=[i for i, _ in alone],
            alone_norms=device.numbers(gradients.norms_of([part for _, part in alone])),
            present=present,
            clipped_all=clipped and calls is not None and calls.given == {watch.ids[i] for i in present},
            unsummed=frozenset(i for i in {*summed, *reduced_summed} if not sums.is_summed(id(watch.params[i]))),
        )

    def _parameters_after(self, event: StepClosing) -> None:
        """Take fingerprints of the parameters that the step has left behind."""
        watch, record = event.watch, event.record
        self._closure = None
        if not record.checked:
            return
        params = watch.readable()
        glances = device.glances(params)
        record.parts[ParameterDigests].after = glances or device.digests(params)
        watch.after, watch.after_step = None if glances is None else glances(), watch.step

    def _state_after(self, event: StepClosing) -> None:
        """Take fingerprints of the optimizer's state."""
        watch, record = event.watch, event.record
        if not record.checked:
            return
        keys, tensors, plain = watch.state()
        later = device.digests(tensors)
        here = watch.after is not None and watch.after_step == watch.step and watch.state_is_small
        watch.state_after = combined(later() + [digest for _, _, digest in plain]) if here else 0
        record.parts[StateDigests] = StateDigests(keys, later, plain)
        self._bus.emit(StateRead(watch, record, keys, tensors))

    @staticmethod
    def _norms(event: StateRead) -> None:
        norms = gradients.norms_of([*event.watch.readable(), *event.tensors])
        event.record.parts[ParameterDigests].norms = device.numbers(norms)

    def _frozen(self, event: StepClosing) -> None:
        """Fingerprint DDP parameters that no optimizer steps, now and then: they should not change at all."""
        watch, record, state = event.watch, event.record, self._state
        if not record.checked or watch.index or watch.step % _FROZEN_EVERY:
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
            record.parts[FrozenDigests] = FrozenDigests([n for n, _ in frozen], device.digests([p for _, p in frozen]))


def _by_owner(digests: Sequence[int], owned: Sequence[bool]) -> tuple[int, int]:
    own = [d for d, is_owned in zip(digests, owned, strict=True) if is_owned]
    foreign = [d for d, is_owned in zip(digests, owned, strict=True) if not is_owned]
    return combined(own), combined(foreign)


def _signs(params: Sequence[Tensor]) -> list[int | None]:
    """Return what changes as parameters are written to: counts of writes, and on the CPU a glance at their values."""
    glances = device.glances(params)
    return [internals.version_of(p) for p in params] + ([] if glances is None else glances())
