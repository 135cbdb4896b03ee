"""The items that a loader delivers for a few fixed indices in every epoch, and whether epochs begin alike.

Ranks that share a data set get the same for each index.

Which indices a batch is made of is known in the main process, where they are drawn, also with workers. Of a loader 32
indices are followed; a batch without any of them costs one look at a set. Nothing is read that was not delivered.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.foreign import attributes_of, is_a, is_one_of, of_class
from ddpdebug.isolation.user_code import user_location
from ddpdebug.isolation.weak_table import WeakTable
from ddpdebug.nested import tensors_in
from ddpdebug.probes.epoch_pace import EpochPace
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import BatchDelivered, Bus, EpochEnded, IndicesDrawn, WorkersBegan
from ddpdebug.schema.announcements import Announce, Items, LeftOut, RepeatedDeliveries, RepeatedOrder

_FOLLOWED = 32
#: Epochs of a loader that are told.
_EPOCHS = 12
#: Indices by which the beginning of an epoch is known, and the least that tell one.
_ORDER, _LEAST_ORDER = 64, 16
#: Different indices from which on a loader draws enough, and how often each of fewer is drawn until it is told.
_FEW, _OFTEN = 32, 16


@dataclass(slots=True)
class _Source:
    """A loader: what it has delivered in this epoch."""

    loader: weakref.ref[DataLoader[Any]]
    number: int
    exact: bool  # rows of a batch are in the order of its indices
    followed: frozenset[int]
    workers: bool
    location: str | None  # that iterates over it
    found: dict[str, tuple[str, str]] = field(default_factory=dict)
    whole: bool = True  # all that was delivered are whole numbers
    epochs: int = 0  # begun
    told: int = 0
    order: list[int] = field(default_factory=list)  # the first indices of this epoch
    order_before: list[int] = field(default_factory=list)  # of the epoch before, if it was trained on
    sampler: dict[str, int | float] = field(default_factory=dict)  # numbers that the sampler began this epoch with
    sampler_before: dict[str, int | float] = field(default_factory=dict)
    step: int | None = None  # at the last delivery of this epoch
    trains: bool = False  # steps were taken between its deliveries
    compared: bool = False  # in this epoch; or nothing is left to tell
    repeated: bool = False
    length: int = 0  # of the data set
    few: set[int] | None = field(default_factory=set)  # all indices so far, while they are few
    drawn: int = 0
    pace: EpochPace | None = None
    left_out: int | None = 0  # batches at the beginning of the epoch before; None once it was told

    def turn(self) -> None:
        """Begin another epoch."""
        self.order_before, self.order = self.order if self.trains else [], []
        loader = self.loader()
        self.sampler_before, self.sampler = self.sampler, {} if loader is None else _numbers(sampler_of(loader))
        self.step, self.trains, self.compared = None, False, self.repeated

    @property
    def over(self) -> bool:
        """Return whether enough was announced."""
        return self.told >= _EPOCHS


@dataclass(slots=True)
class _Reading:
    """An iterator: the indices of batches that it has not delivered yet."""

    begun: object | None = None  # the epoch in which they were drawn
    source: _Source | None = None
    waiting: deque[Sequence[Any]] = field(default_factory=deque)
    broken: bool = False


class DeliveredItems:
    """The followed items of all loaders."""

    def __init__(self, bus: Bus, state: StepState, announce: Announce) -> None:
        self._state, self._announce = state, announce
        self._sources: WeakTable[_Source] = WeakTable()
        self._readings: WeakTable[_Reading] = WeakTable()
        self._beginning: tuple[_Source | None] | None = None
        bus.on("probe:items", IndicesDrawn, self._drawn)
        bus.on("probe:items", WorkersBegan, self._began)
        bus.on("probe:items", BatchDelivered, self._delivered)
        bus.on("probe:items", EpochEnded, self._ended)

    def begin(self, loader: DataLoader[Any], number: int, length: int | None) -> None:
        """Record the start of an epoch; results of an interrupted epoch before it are announced now."""
        source = self._sources.get(loader)
        if source is None and _can_be_followed(loader) and length is not None and length > 1:
            own = attributes_of(loader)
            collates, works = own.get("collate_fn") is default_collate, bool(own.get("num_workers"))
            source = self._sources[loader] = _Source(
                weakref.ref(loader), number, collates, _followed(length), works, user_location()
            )
            source.length = length
        if source is not None:
            if source.epochs > source.told:
                self._tell(source)
            source.epochs += 1
            self._look_back(source)
            source.turn()
        self._beginning = (source,)

    def _look_back(self, source: _Source) -> None:
        """Announce a loop that leaves out as many batches at the beginning of one epoch as of the one before."""
        step, pace = self._state.next_step(), source.pace
        source.pace = EpochPace(step)
        if pace is None or source.left_out is None:
            return
        number = pace.left_out(step)
        if not number or number != source.left_out:
            source.left_out = number
            return
        source.left_out = None
        self._announce(LeftOut(step=step, batches=number, of=pace.batches, location=source.location))

    def _tell(self, source: _Source) -> None:
        if not source.over and self._state.world > 1:
            step, found = self._state.next_step(), dict(source.found)
            self._announce(Items(step=step, items=found, exact=source.exact, whole=source.whole), source.number)
        source.told, source.found = source.epochs, {}

    def _drawn(self, event: IndicesDrawn) -> None:
        reading = self._readings.get(event.iterator)
        if reading is None:
            reading = self._readings[event.iterator] = _Reading()
        if self._beginning is not None and reading.begun is not self._beginning:
            self._begins(reading)
        if reading.source is None or reading.broken:
            return
        if not reading.source.workers:
            reading.waiting.clear()  # what was drawn before has failed
        reading.waiting.append(event.indices)

    def _begins(self, reading: _Reading) -> None:
        """Forget what is left of the epoch before: an iterator with persistent workers goes on to the next one."""
        reading.begun, reading.broken = self._beginning, False
        reading.source = None if self._beginning is None else self._beginning[0]
        reading.waiting.clear()

    def _began(self, event: WorkersBegan) -> None:
        reading = self._readings.get(event.iterator)
        if reading is None:
            try:
                reading = self._readings[event.iterator] = _Reading()
            except TypeError:  # a generator of a loader of the script's own
                reading = _Reading()
        if reading.begun is not self._beginning:
            self._begins(reading)
        self._beginning = None

    def _delivered(self, event: BatchDelivered) -> None:
        reading = self._readings.get(event.iterator)
        if reading is None or reading.broken or not reading.waiting:
            return
        indices, source = reading.waiting.popleft(), reading.source
        if source is None or type(indices) is not list or not indices or type(indices[0]) is not int:
            return
        if source.pace is not None and source.left_out is not None:
            source.pace.delivered(self._state.next_step())
        if not source.repeated:
            self._follow(source, indices)
        if not source.over and not source.followed.isdisjoint(indices):
            self._read(source, indices, event.batch)

    def _follow(self, source: _Source, indices: Sequence[int]) -> None:
        """Note the order of the first indices of an epoch, and whether it is trained on."""
        step = self._state.next_step()
        source.trains = source.trains or (source.step is not None and source.step != step)
        source.step = step
        if source.few is not None:
            self._count(source, indices)
        if len(source.order) < _ORDER:
            source.order += indices[: _ORDER - len(source.order)]
        elif not source.compared:
            self._compare(source)

    def _count(self, source: _Source, indices: Sequence[int]) -> None:
        """Announce a loader that draws the same few samples of many for training, again and again."""
        few = source.few = (source.few or set()).union(indices)
        source.drawn += len(indices)
        if len(few) > _FEW or len(few) * 4 > source.length:
            source.few = None
        elif source.trains and source.drawn >= _OFTEN * len(few) and source.drawn >= 4 * _FEW:
            source.few, loader = None, source.loader()
            told = RepeatedDeliveries(batches=0, again=0, drawn=source.drawn, different=len(few), length=source.length)
            workers = attributes_of(loader).get("num_workers") or 0
            self._announce(replace(told, workers=workers, location=source.location, step=self._state.next_step()))

    def _compare(self, source: _Source) -> None:
        """Announce an epoch that is trained on in the order of the one before."""
        source.compared, order = True, source.order
        if not source.trains or len(order) < _LEAST_ORDER or order != source.order_before or _is_sorted(order):
            return
        sampler = None if (loader := source.loader()) is None else sampler_of(loader)
        if sampler is None or is_a(sampler, DistributedSampler) or source.sampler != source.sampler_before:
            return  # one that was told the epoch, and keeps its order, does so on purpose: a curriculum
        source.repeated = True
        epoch = source.sampler.get("epoch")
        fact = RepeatedOrder(
            step=self._state.next_step(),
            sampler=type(sampler).__name__,
            set_epoch=of_class(type(sampler), "set_epoch") is not None,
            epoch=epoch if type(epoch) is int else None,
            indices=len(order),
            location=source.location,
        )
        self._announce(fact)

    def _read(self, source: _Source, indices: Sequence[int], batch: Any) -> None:
        size = len(indices)
        columns = [t for t in tensors_in(batch) if t.dim() and len(t) == size and t.is_cpu and internals.is_plain(t)]
        labels = [t for t in columns if t.numel() == size]
        records = [t for t in columns if t.numel() != size]
        source.whole = source.whole and not any([t.is_floating_point() or t.is_complex() for t in records])
        with torch.no_grad():
            for row, index in enumerate(indices):
                if index in source.followed:
                    source.found[str(index)] = _digest(labels, row), _digest(records, row)

    def _ended(self, event: EpochEnded) -> None:
        reading = self._readings.get(event.iterator)
        if reading is None or reading.source is None:
            return
        if event.failed:  # a batch of workers is lost, and the script may go on
            reading.broken = reading.source.workers
            return
        if reading.source.pace is not None:
            reading.source.pace.whole = True
        if not event.failed and not reading.source.compared:
            self._compare(reading.source)
        if not event.failed and reading.source.epochs > reading.source.told:
            self._tell(reading.source)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that draws the single indices of a loader, as far as known."""
    own = attributes_of(loader)
    inner = attributes_of(own.get("batch_sampler")).get("sampler")
    return own.get("sampler") if inner is None else inner


def _numbers(sampler: Any) -> dict[str, int | float]:
    """Return the numbers in an object's attributes; no property of it is asked."""
    return {name: value for name, value in list(attributes_of(sampler).items()) if is_one_of(value, (int, float))}


def _is_sorted(order: Sequence[int]) -> bool:
    """Whether indices come up or down with few exceptions: as they are stored, by length, in strides or blocks."""
    pairs = list(pairwise(order))
    up = sum(one <= other for one, other in pairs)
    return min(up, len(pairs) - up) * 8 < len(pairs)


def _can_be_followed(loader: DataLoader[Any]) -> bool:
    own = attributes_of(loader)
    map_style = not is_a(own.get("dataset"), IterableDataset)
    return map_style and own.get("batch_sampler") is not None and bool(own.get("in_order", True))


def _followed(length: int) -> frozenset[int]:
    """Return indices all over a data set, the same on all ranks."""
    return frozenset(
        (number * length // _FOLLOWED + number * 7919 % max(1, length // _FOLLOWED)) % length
        for number in range(_FOLLOWED)
    )


def _digest(columns: Sequence[torch.Tensor], row: int) -> str:
    """Return a short digest of one row of some tensors, with its shape; empty where there are none."""
    if not columns:
        return ""
    parts = [(fingerprint.glance(column[row]), fingerprint.of_text(str(column.shape[1:]))) for column in columns]
    return f"{fingerprint.combine([value for part in parts for value in part]) >> 32:08x}"
