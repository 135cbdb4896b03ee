"""What a loader delivers for a few fixed indices, epoch after epoch: ranks that share a data set get the same for each.

Which indices a batch is made of is known in the main process, where they are drawn, also with workers. Of a loader 32
indices are followed; a batch without any of them costs one look at a set. Nothing is read that was not delivered.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.nested import tensors_in
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import BatchDelivered, Bus, EpochEnded, IndicesDrawn, WorkersBegan
from ddpdebug.schema.announcements import Announce, Items

_FOLLOWED = 32
#: Epochs of a loader that are told.
_EPOCHS = 12


@dataclass(slots=True)
class _Source:
    """A loader: what it has delivered in this epoch."""

    number: int
    exact: bool  # rows of a batch are in the order of its indices
    followed: frozenset[int]
    workers: bool
    found: dict[str, tuple[str, str]] = field(default_factory=dict)
    whole: bool = True  # all that was delivered are whole numbers
    epochs: int = 0  # begun
    told: int = 0

    @property
    def over(self) -> bool:
        """Tell whether enough was told."""
        return self.told >= _EPOCHS


@dataclass(slots=True)
class _Reading:
    """An iterator: the indices of batches that it has not delivered yet."""

    begun: object | None = None  # the epoch in which they were drawn
    source: _Source | None = None
    waiting: deque[Sequence[Any]] = field(default_factory=deque)
    broken: bool = False


class DeliveredItems:
    """Follows the fixed indices of all loaders."""

    def __init__(self, bus: Bus, state: StepState, announce: Announce) -> None:
        self._state, self._announce = state, announce
        self._sources: weakref.WeakKeyDictionary[DataLoader[Any], _Source] = weakref.WeakKeyDictionary()
        self._readings: weakref.WeakKeyDictionary[Any, _Reading] = weakref.WeakKeyDictionary()
        self._beginning: tuple[_Source | None] | None = None
        bus.on("probe:items", IndicesDrawn, self._drawn)
        bus.on("probe:items", WorkersBegan, self._began)
        bus.on("probe:items", BatchDelivered, self._delivered)
        bus.on("probe:items", EpochEnded, self._ended)

    def begin(self, loader: DataLoader[Any], number: int, length: int | None) -> None:
        """Note the start of an epoch; what an epoch has shown that was broken off is told now."""
        source = self._sources.get(loader)
        if source is None and _can_be_followed(loader) and length is not None and length > 1:
            collates = loader.collate_fn is default_collate
            source = self._sources[loader] = _Source(number, collates, _followed(length), loader.num_workers > 0)
        if source is not None:
            if source.epochs > source.told:
                self._tell(source)
            source.epochs += 1
        self._beginning = (source,)

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
        if source is None or source.over or type(indices) is not list or not indices or type(indices[0]) is not int:
            return
        if not source.followed.isdisjoint(indices):
            self._read(source, indices, event.batch)

    def _read(self, source: _Source, indices: Sequence[int], batch: Any) -> None:
        size = len(indices)
        columns = [t for t in tensors_in(batch) if t.dim() and len(t) == size and t.is_cpu and internals.is_plain(t)]
        labels = [t for t in columns if t.numel() == size]
        records = [t for t in columns if t.numel() != size]
        source.whole = source.whole and not any(t.is_floating_point() or t.is_complex() for t in records)
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
        elif reading.source.epochs > reading.source.told:
            self._tell(reading.source)


def _can_be_followed(loader: DataLoader[Any]) -> bool:
    map_style = not isinstance(loader.dataset, IterableDataset)
    return map_style and loader.batch_sampler is not None and getattr(loader, "in_order", True)


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
