"""Gradients before and after FSDP2 reduces them: sums of each rank's inputs, by piece, and of the piece it gets.

What a rank gets is the sum of the ranks' gradients for its piece, divided: so sums over elements must agree as well, up
to rounding. That covers whatever lies between: the collectives, or the script's own in their place, divisions, hooks,
copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import async_copy as device, gradients
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.loop_calls import StepCalls
from ddpdebug.probes.record import Part, StepRecord
from ddpdebug.probes.shard_gathers import Gathered
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import BackwardEnded, Bus, GradientsFinal, OptimizerBuilt
from ddpdebug.schema.row import CHECKSUM_SLOTS, Flag

#: By how much the factors of two norms differ at most that are one factor, of bfloat16 too.
_ALIKE = 2.0**-8
#: Sums of pieces are kept one by one for so many ranks.
_MOST_PIECES = 64


class PutIn(NamedTuple):
    """The norm and the sums, by piece, of this rank's gradients of one parameter in a step."""

    norm: float
    sums: tuple[float, ...]  # by piece


class _Term(NamedTuple):
    """One gradient of one parameter, before it is reduced."""

    key: int
    factor: float
    ranks: int
    norm: torch.Tensor | None  # None once it was read
    sums: Sequence[torch.Tensor | None]


@dataclass(slots=True)
class ShardSums(Part, key="probe:shard-gradients"):
    """Sums of the gradients of a step, by the id of the sharded parameter, over all of its backwards."""

    terms: list[_Term] = field(default_factory=list)
    before: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)  # of pieces, as each backward found them
    places: dict[int, int] = field(default_factory=dict)  # which piece this rank gets, -1 where they have one sum
    copies: dict[int, int] = field(default_factory=dict)  # of what each of them becomes
    after: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)  # and as each left them
    norms: dict[int, tuple[torch.Tensor, int | None]] = field(default_factory=dict)  # of `after`, and counts of writes
    scaled: device.LaterFloats = list  # norms of those that the script has written to since, and theirs before
    divided: set[tuple[float, int]] = field(default_factory=set)  # by what the sums are, and over how many ranks
    flags: int = 0
    is_partial: bool = False  # something was reduced in a way that is not followed
    read: device.LaterFloats = list

    def table(self, record: StepRecord) -> dict[str, tuple[PutIn, int, float]]:
        """Return name -> this rank's inputs, the number of its piece, and the sum over the piece; NaN if unknown."""
        found = self.read()
        there = [*self.before.values(), *self.after.values()]
        if len(found) != sum(1 + len(term.sums) for term in self.terms) + sum(len(sums) for sums in there):
            return {}  # a backward whose end was not seen
        numbers = iter(found)
        own: dict[int, PutIn] = {}
        for term in self.terms:
            norm = next(numbers) * term.factor * math.sqrt(term.ranks)
            sums = tuple([next(numbers) * term.factor for _ in term.sums])
            if (known := own.get(term.key)) is not None:
                both = zip(sums, known.sums, strict=True)
                norm, sums = math.hypot(norm, known.norm), tuple([now + before for now, before in both])
            own[term.key] = PutIn(norm, sums)
        before = {key: sum([next(numbers) for _ in sums]) for key, sums in self.before.items()}
        after = {key: sum([next(numbers) for _ in sums]) - before.get(key, 0.0) for key, sums in self.after.items()}
        return {
            name: (own[key], self.places[key], after.get(key, math.nan))
            for key, name in zip(record.ids, record.names, strict=True)
            if key in own
        }

    def columns(self, record: StepRecord) -> dict[str, Any]:
        """Return checksums by slot, whose sums over all ranks must agree."""
        scaled = {"grads_scaled": _factor(self.scaled())}
        if not record.checked or record.sharding is None or self.is_partial or not (table := self.table(record)):
            return {"flags": self.flags, **scaled}
        copies = dict(zip(record.names, [self.copies.get(key, 1) for key in record.ids], strict=True))
        slots = {name: record.slots[key] for name, key in zip(record.names, record.ids, strict=True)}
        local, norms, reduced = (list[list[float]]([] for _ in range(CHECKSUM_SLOTS)) for _ in range(3))
        for name, (own, place, got) in table.items():
            weights = _weights(len(own.sums))
            local[slots[name]] += [weight * part for weight, part in zip(weights, own.sums, strict=True)]
            norms[slots[name]].append(own.norm)
            reduced[slots[name]].append(weights[place] * got / copies[name])
        found: dict[str, Any] = {"flags": self.flags, **scaled}
        for slot in range(CHECKSUM_SLOTS):
            found[f"local_norm_{slot}"] = math.hypot(*norms[slot])
            found[f"local_sum_{slot}"], found[f"reduced_sum_{slot}"] = math.fsum(local[slot]), math.fsum(reduced[slot])
        return found

    def let_go(self) -> None:
        """Keep numbers instead of tensors."""
        numbers, scaled = self.read(), self.scaled()
        self.read, self.scaled = lambda: numbers, lambda: scaled
        self.norms.clear()
        self.terms = [term._replace(norm=None, sums=[None] * len(term.sums)) for term in self.terms]
        for sums in (*self.before.values(), *self.after.values()):
            sums[:] = [None] * len(sums)


class ShardReductions:
    """The probe of FSDP2's reductions, in checked steps."""

    def __init__(self, bus: Bus, state: StepState, guard: Guard) -> None:
        self._state, self._entries, self._is_placed = state, entries_of(guard), False
        self._parameters: dict[int, Any] = {}  # whose gradients the backward that runs has reduced
        bus.on("probe:shard-gradients", OptimizerBuilt, self._place)
        bus.on("probe:shard-gradients", BackwardEnded, self._reduced)
        bus.on("probe:shard-gradients", GradientsFinal, self._final)

    def _place(self, _: OptimizerBuilt) -> None:
        """Look at how FSDP2 reduces gradients, once something has loaded it."""
        if not self._is_placed and self._state.world > 1 and (found := internals.fsdp_reductions()) is not None:
            self._is_placed = True
            looks = (("probe:shard-gradients", self._reduces),)
            why = "what each rank puts into the gradients that FSDP2 reduces"
            self._entries.patch(*found, why, before=looks, who=self._is_wanted, always_ask=True)

    def _is_wanted(self, *_: Any, **__: Any) -> bool:
        self._state.reduced = True  # counted in every step, as those of DDP are
        return self._state.checking

    def _reduces(self, *args: Any, **kwargs: Any) -> None:
        """Sum this rank's gradients, which are about to be reduced."""
        sums = self._state.since.parts[ShardSums]
        reduction = internals.reduction_of(args, kwargs)
        if reduction is None:
            return
        gathered = self._state.since.parts[Gathered]
        gathered.settle(reduction.parameters, is_apart=reduction.is_apart)
        if reduction.kept:
            gathered.keep(reduction.kept)
        if not reduction.is_whole:
            sums.is_partial = True
            return
        sums.flags |= Flag.HALF_REDUCTION if reduction.is_half else 0
        sums.flags |= Flag.CUSTOM_REDUCTION | Flag.HALF_REDUCTION if reduction.is_custom else 0
        sums.divided.add((math.nan if reduction.is_custom else reduction.divisor, reduction.ranks))
        with torch.no_grad():
            for parameter, grad, rows in zip(reduction.parameters, reduction.gradients, reduction.rows, strict=True):
                key = id(parameter)
                if key not in self._parameters and parameter.grad is not None:
                    sums.before.setdefault(key, []).append(gradients.sum_of(internals.held_here(parameter.grad)))
                self._parameters[key] = parameter
                own = grad.detach() if grad.requires_grad else grad
                pieces = _pieces(own, rows, reduction.pieces)
                sums.places[key] = reduction.place if len(pieces) == reduction.pieces else -1
                sums.copies[key] = reduction.ranks // reduction.pieces
                sums.terms.append(_Term(key, 1 / reduction.divisor, reduction.ranks, gradients.norm_of(own), pieces))

    def _reduced(self, _: BackwardEnded) -> None:
        """Sum what has come of them."""
        if not self._parameters or self._state.in_backward:
            return
        sums = self._state.since.parts[ShardSums]
        with torch.no_grad():
            for key, parameter in self._parameters.items():
                if parameter.grad is not None:  # an optimizer inside of backward has used it
                    sums.after.setdefault(key, []).append(gradients.sum_of(internals.held_here(parameter.grad)))
            left = [(key, grad) for key, p in self._parameters.items() if (grad := p.grad) is not None]
            norms = gradients.norms_of([internals.held_here(grad) for _, grad in left])
            for (key, grad), norm in zip(left, norms, strict=True):
                sums.norms[key] = norm, internals.version_of(grad)
        self._parameters.clear()
        of_terms = [scalar for term in sums.terms for scalar in (term.norm, *term.sums)]
        every = [*of_terms, *chain.from_iterable([*sums.before.values(), *sums.after.values()])]
        sums.read = device.numbers([scalar for scalar in every if scalar is not None])

    @staticmethod
    def _final(event: GradientsFinal) -> None:
        """Take the norms of shards that the script has written to since backward, not by torch's own clipping."""
        since = event.record.since
        known, calls = since.parts[ShardSums].norms, since.parts.get(StepCalls)
        if not known or (calls is not None and calls.clippings):
            return
        given = [(p.grad, *known[id(p)]) for p in event.watch.params if p.grad is not None and id(p) in known]
        written = [(grad, before) for grad, before, version in given if internals.version_of(grad) != version]
        if len(written) == len(given) > 1:  # of one alone any change of length may be a factor
            norms = gradients.norms_of([internals.held_here(grad) for grad, _ in written])
            since.parts[ShardSums].scaled = device.numbers([*norms, *(before for _, before in written)])


def _factor(norms: Sequence[float]) -> float:
    """Return the factor between norms and as many earlier ones; NaN if there is no one factor for all."""
    pairs = zip(norms[: len(norms) // 2], norms[len(norms) // 2 :], strict=True)
    factors = [now / before for now, before in pairs if before > 0]
    if len(factors) < 2 or not max(factors) - min(factors) <= _ALIKE * max(factors):
        return math.nan
    return sum(factors) / len(factors)


def _pieces(grad: torch.Tensor, rows: int, number: int) -> list[torch.Tensor]:
    """Return the sums over the piece of each rank; one sum where there are many ranks, or pieces lie otherwise."""
    if not rows or not grad.numel() or not 1 < number <= _MOST_PIECES:
        return [gradients.sum_of(grad)]
    whole = grad.shape[0] // rows  # pieces that are full: their sums are one operation, for a launch costs more
    sums = gradients.sum_of(grad[: whole * rows].reshape(whole, -1), 1).unbind()
    return [
        *[internals.unlisted(sum_) for sum_ in sums],
        *[gradients.sum_of(grad[i * rows : (i + 1) * rows]) for i in range(whole, number)],
    ]


def _weights(pieces: int) -> list[float]:
    """Return a weight for each piece, 1 on average: pieces that get to the wrong ranks give another sum."""
    return [0.5 + (i + 0.5) / pieces for i in range(pieces)]
