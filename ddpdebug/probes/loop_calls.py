"""Calls of the training loop beside forward, backward and step: clipping, loss scaling, loads, gathers, losses."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import is_a
from ddpdebug.probes import async_copy as device
from ddpdebug.probes.holding import BOUND
from ddpdebug.probes.record import Part, StepRecord
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import BackwardBegan, Bus, Clipped, ForwardBegan, Gathered, Loaded, LossScaled
from ddpdebug.probes.values import loss_reader
from ddpdebug.schema import announcements
from ddpdebug.schema.announcements import Announce
from ddpdebug.schema.details import Clip, Load
from ddpdebug.schema.row import Flag
from ddpdebug.torch_internals import graph

#: Gathers that cut gradients are announced so often; the rest are other call sites of the same mistake.
_MAX_GATHERS = 3

#: Steps by which it is decided whether losses add up.
_DECIDING = 16


class Adding:
    """Whether the losses of micro-batches add up to the step's loss; the first steps with several of them decide.

    A rank's labels may be some more or less than its share of all ranks' labels. What they add up to is then nearer to
    one loss than to as many as there are, in the mean over some steps. Where labels are left out of a mean by chance,
    steps would differ in that.
    """

    def __init__(self) -> None:
        self._wholes: list[float] = []

    def holds(self, parts: Sequence[float]) -> bool:
        """Take a step, by each loss's share of all labels; return whether the losses add up."""
        if len(parts) < 2:
            return False
        whole = math.fsum(parts)
        if len(self._wholes) < _DECIDING and math.isfinite(whole):
            self._wholes.append(whole)
        if not self._wholes:
            return False
        root = math.sqrt(len(parts))
        return 1 / root < math.fsum(self._wholes) / len(self._wholes) < root


@dataclass(slots=True)
class Losses(Part, key="probe:losses"):
    """The losses given to backward, reported or observed, and the loss scale at the step."""

    given: list[Callable[[], float]] = field(default_factory=list)  # one for each micro-batch, unscaled
    divisors: list[float | None] = field(default_factory=list)  # by which the script has divided each at last
    #: which part of all labels that it was divided by the sum of each is over, where it is one
    label_shares: list[Callable[[], float] | None] = field(default_factory=list)
    kind: int = 0  # of the first of them
    validation: list[Callable[[], float]] = field(default_factory=list)
    seen: bool = False  # the validation losses: nobody has told them
    scale: Callable[[], float] | None = None
    factor: Callable[[], float] | None = None  # with which GradScaler has multiplied what was given to backward
    told: bool = False  # the loss, by the script
    adding: Adding = field(default_factory=Adding)
    shares: int = 1  # each loss is one of so many parts of one; a window may be cut short, or take over the one before

    def settle(self, usual: int) -> int:
        """Decide at the end of a step whether its backward losses add up to one loss or are separate ones.

        Args:
            usual: of how many parts losses were until now.

        Returns:
            the same, as this step has it.
        """
        count, divisors = len(self.given), set(self.divisors)
        divisor = divisors.pop() if len(divisors) == 1 else None
        if divisor is not None and count > 1 and math.isclose(divisor, count):
            usual = count
        self.shares = usual if divisor is not None and math.isclose(divisor, usual) else 1
        return usual

    def _add_up(self) -> bool:
        """Return whether the losses are sums over labels, each divided by the labels of all, or nearly as many."""
        parts = [part() for part in self.label_shares if part is not None]
        return len(parts) == len(self.given) and self.adding.holds(parts)

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return the loss of the step, and the loss scale."""
        found: dict[str, Any] = {"flags": int(Flag.VAL_LOSS_SEEN) if self.seen else 0}
        if self.scale is not None:
            found["loss_scale"] = self.scale()
        if losses := [read() for read in self.given]:
            found["loss_kind"] = self.kind
            whole = math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan
            found["loss"] = whole if self._add_up() else whole / len(losses) * self.shares
            found["flags"] |= 0 if math.isfinite(found["loss"]) else int(Flag.LOSS_NONFINITE)
            if not self.told and self.factor is not None and self.factor() == 0:  # backward's tells no more than that
                found["loss"] = math.nan
        if self.validation:
            found["val_loss"] = math.fsum(read() for read in self.validation) / len(self.validation)
        return found


def kind_of(loss: torch.Tensor) -> int:
    """Return a number of the newest operations that a loss is made of: losses of several kinds may train in turn."""
    node = loss.grad_fn
    if node is None:
        return 0
    below = [before for before, _ in node.next_functions if before is not None]
    names = [graph.name_of(each) for each in (node, *below)]
    return zlib.crc32(",".join(names).encode())


class Clipping(NamedTuple):
    """A clipping whose norm may still be on a device."""

    norm: Callable[[], float]
    limit: float
    before_sync: bool  # of this rank's own gradients
    location: str | None
    given: frozenset[int] | None  # ids of the parameters, in a checked step
    norm_type: float


@dataclass(slots=True)
class StepCalls(Part, key="probe:clip"):
    """Clippings, loads, and gathers that detach gradients."""

    clippings: list[Clipping] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    gathered: list[announcements.Gathered] = field(default_factory=list)
    early: bool = False  # one came before the last backward: what it has scaled is not what the step uses

    def columns(self, record: StepRecord) -> dict[str, Any]:
        """Return the newest clipping; sharded gradients are reduced within backward."""
        flags = int(Flag.LOADED) if self.loads else 0
        if not self.clippings:
            return {"flags": flags}
        early = record.sharding is None and any([clip.before_sync for clip in self.clippings])
        flags |= int(Flag.CLIPPED) | (int(Flag.CLIPPED_BEFORE_SYNC) if early else 0)
        last = self.clippings[-1]
        return {"flags": flags, "clip_norm": last.norm(), "clip_max": last.limit}

    @property
    def clips(self) -> list[Clip]:
        """Return the calls that clipped gradients; may wait for a device."""
        return [
            Clip(norm=c.norm(), max=c.limit, before_sync=c.before_sync, location=c.location) for c in self.clippings
        ]

    @property
    def euclidean(self) -> bool:
        """Whether gradients were clipped, and by the 2-norm only."""
        return bool(self.clippings) and not [1 for clip in self.clippings if clip.norm_type != 2]

    @property
    def given(self) -> set[int] | None:
        """The ids of the clipped parameters; None if unknown."""
        given = [clip.given for clip in self.clippings if clip.given is not None]
        return set().union(*given) if len(given) == len(self.clippings) else None

    def goes_by_one(self) -> bool:
        """Whether all clippings were of the step's gradients, by one norm and limit: groups are clipped one by one."""
        return not self.early and len({(clip.norm(), clip.limit) for clip in self.clippings}) == 1

    def let_go(self) -> None:
        """Keep numbers instead of tensors."""
        self.clippings = [clip._replace(norm=partial(float, clip.norm()), given=None) for clip in self.clippings]


class LoopCalls:
    """The probe of these calls; knows the loss scale in force.

    Args:
        announce: tells all ranks.
    """

    def __init__(self, bus: Bus, state: StepState, announce: Announce) -> None:
        self._state, self._announce = state, announce
        self.last_loss_scale: Callable[[], float] | None = None
        self._scaled_by: torch.Tensor | None = None
        self.tells_validation = False  # the script does: nothing has to be guessed
        self._gathers = 0
        self._lists: list[tuple[list[Any], announcements.Gathered]] = []
        bus.on("probe:clip", Clipped, self.clipped)
        bus.on("probe:clip", BackwardBegan, self._adds_gradients)
        bus.on("probe:scaler", LossScaled, self._scaled)
        bus.on("probe:load", Loaded, self._loaded)
        bus.on("probe:gather", Gathered, self._gathered)
        bus.on("probe:gather", ForwardBegan, self._drop_gathers)
        bus.on("probe:gather", BackwardBegan, self._close_gathers)

    def clipped(self, event: Clipped) -> None:
        """Record a gradient clipping; `before_sync` if it saw this rank's own gradients."""
        state, norm = self._state, event.norm
        alone = not state.wrappers and state.world > 1
        local = any([w.pending is not None for w in state.wrappers]) or alone
        norm = internals.own_part(norm) if internals.is_distributed(norm) and internals.is_whole(norm) else norm
        # of parts the number is known by a collective, which is the job's to call, and a fake one has none; one on a
        # device costs a copy
        known = internals.is_plain(norm) and (norm.device.type == "cpu" or state.checking)
        read = loss_reader(norm.detach(), None) if known else lambda: math.nan
        given = frozenset(map(id, event.given)) if state.checking and event.given is not None else None
        state.since.parts[StepCalls].clippings.append(
            Clipping(read, event.limit, local, event.location, given, event.norm_type)
        )

    def _adds_gradients(self, _: BackwardBegan) -> None:
        calls = self._state.since.parts.get(StepCalls)
        if calls is not None and calls.clippings:
            calls.early = True

    def observed(self, name: str, loss: Any) -> None:
        """Take a loss that the user reports: `loss` instead of the one given to backward, or `val_loss`."""
        value = loss.detach() if is_a(loss, torch.Tensor) else torch.tensor(float(loss))
        losses, reader = self._state.since.parts[Losses], loss_reader(value, None)
        if name == "loss":
            losses.given, losses.told = [reader], True
        else:
            self.tells_validation = True
            losses.validation.append(reader)

    def _scaled(self, event: LossScaled) -> None:
        """Note the loss scale in force; the tensor is changed in place later, so it is read or copied now."""
        scale = event.scale
        if scale is None:  # a scaler that is off on this rank may be on elsewhere
            self.last_loss_scale = lambda: 1.0
            return
        self._scaled_by = internals.unlisted(scale.detach().clone())
        read = device.numbers([self._scaled_by])
        if scale.device.type == "cpu":
            value = read()[0]
            self.last_loss_scale = lambda: value
        else:
            self.last_loss_scale = lambda: read()[0]

    def take_scale(self) -> torch.Tensor | None:
        """Return and clear the scale of the loss that is given to backward now; None if it is not scaled."""
        scale, self._scaled_by = self._scaled_by, None
        return scale

    @property
    def is_scaled(self) -> bool:
        """Return whether the loss that is given to backward next is scaled."""
        return self._scaled_by is not None

    def known_scale(self) -> float:
        """Return the loss scale in force; NaN if it is on a device."""
        scale = self._scaled_by
        return float(scale) if scale is not None and scale.device.type == "cpu" else float("nan")

    def _loaded(self, event: Loaded) -> None:
        self._state.since.parts[StepCalls].loads.append(Load(what=event.what, location=event.location))

    def _gathered(self, event: Gathered) -> None:
        """Note an all_gather of a tensor that requires grad; looked at in backward, when the list is in its final form.

        The list is held until then, unless it is large, or a forward comes first. One of a class of the script's is not
        looked at: it would be asked for what it has.
        """
        lists = [event.outputs, *(some for some, _ in self._lists)]
        if len(lists) > 1 + _MAX_GATHERS or type(event.outputs) is not list:
            return
        if sum([o.numel() * o.itemsize for some in lists for o in some if is_a(o, torch.Tensor)]) <= BOUND:
            fact = announcements.Gathered(location=event.location, shapes=(tuple(event.tensor.shape),))
            self._lists.append((event.outputs, fact))

    def _drop_gathers(self, _: ForwardBegan) -> None:
        """Let go of lists that no backward has followed: in a validation none will, and they may hold their graph."""
        self._lists.clear()

    def _close_gathers(self, _: BackwardBegan) -> None:
        """Note which gathers have cut the gradient: those whose own slot was not put back."""
        lists, self._lists = self._lists, []
        for outputs, fact in lists:
            if any([is_a(o, torch.Tensor) and o.requires_grad for o in outputs]):
                continue  # the usual way to keep the local gradient
            self._state.since.parts[StepCalls].gathered.append(fact)
            if self._gathers < _MAX_GATHERS:
                self._announce(fact, self._gathers)
                self._gathers += 1
