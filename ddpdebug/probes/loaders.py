"""The batches of DataLoaders and the settings of their samplers: shards must differ, everything else must agree."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.foreign import attributes_of, is_a
from ddpdebug.isolation.user_code import user_location
from ddpdebug.isolation.weak_table import WeakTable
from ddpdebug.nested import tensors_in
from ddpdebug.probes.copied_generators import CopiedGenerator, copied_generator
from ddpdebug.probes.datasets import Splits, held_by, source_of
from ddpdebug.probes.delivered_items import DeliveredItems, sampler_of
from ddpdebug.probes.lengths import batches_of, length_of
from ddpdebug.probes.record import Part, StepRecord, combined
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import (
    BatchAwaited,
    BatchDelivered,
    Bus,
    EpochBegan,
    EpochEnded,
    SubsetMade,
    WorkersBegan,
)
from ddpdebug.schema.announcements import (
    Announce,
    AwaitedLoader,
    Loader,
    RepeatedDeliveries,
    RepeatedNumbers,
    StreamEnded,
)
from ddpdebug.schema.details import hex_digest

#: Read of each tensor of a batch.
RECORD_BYTES = 1 << 18
#: So many batches that training gets are looked at together first, twice as many each time that it has been told.
_BATCHES = 8
#: Batches of each loader that are compared with the ones before them.
_PAIRS = 16
#: Another loader is waited for where that takes so many times as long as the one that was told, twice in a row.
_CLEARLY = 1.5


@dataclass(slots=True)
class Deliveries(Part, key="probe:loader"):
    """Digests of the batches that a DataLoader delivered."""

    newest: int = 0  # not yet fed to a training forward
    tensors: dict[int, int] = field(default_factory=dict)  # digest of a delivered tensor -> that of its batch
    fed: list[int] = field(default_factory=list)

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return one digest of the samples that were fed to the model."""
        return {"record_digest": combined(self.fed)}


@dataclass(slots=True)
class _Pairs:
    """Batches of a loader, each compared with the one before."""

    workers: int
    location: str | None
    newest: int = 0
    batches: int = 0
    again: int = 0


class Loaders:
    """The probe of every DataLoader of the process, numbered in the order of first use."""

    def __init__(self, bus: Bus, state: StepState, announce: Announce) -> None:
        self._state, self._announce = state, announce
        self._iterators: WeakTable[None] = WeakTable()
        self._known: WeakTable[dict[str, Any]] = WeakTable()
        self._begun: dict[str, int] | None = None  # a pass over a stream, until its iterator is known
        self._pairs: dict[int, _Pairs] = {}  # by the number of the loader
        self._streams: WeakTable[dict[str, int]] = WeakTable()
        self._numbers: WeakTable[int] = WeakTable()  # of iterators' loaders
        self._newest = 0
        self._waited: dict[int, float] = {}  # number of a loader -> seconds
        self._batches, self._enough = 0, _BATCHES
        self._awaited: int | None = None
        self._next: int | None = None  # may be awaited now
        self._copied: CopiedGenerator | None = None
        self._splits, self._items = Splits(), DeliveredItems(bus, state, announce)
        self._asked = state.clock.now()
        self._whole = False  # one batch is the whole epoch over the newest loader: trained on again and again by right
        self.samples: int | None = None  # in the data set over which an epoch was begun last
        self.batch: int | None = None  # samples in a batch of that loader
        bus.on("probe:splits", SubsetMade, self._subset_made)
        bus.on("probe:loader", EpochBegan, self.begin)
        bus.on("probe:loader", WorkersBegan, self._workers_began)
        bus.on("probe:loader", BatchAwaited, self._waits)
        bus.on("probe:loader", BatchDelivered, self.delivered)
        bus.on("probe:loader", EpochEnded, self._ended)

    @property
    def repeated(self) -> bool:
        """Return whether a second epoch has begun over some loader."""
        return any([known["iterations"] > 1 for known in self._known.values()])

    def begin(self, event: EpochBegan) -> None:
        """Record the start of an epoch."""
        loader = event.loader
        own = attributes_of(loader)  # of which a subclass may have made properties
        dataset = own.get("dataset")
        known = self._known.get(loader)
        if known is None:
            held = dict(held_by(dataset))
            used = {other["index"] for other in self._known.values()}
            known = {
                "index": min({*range(len(used) + 1)} - used),  # not that of a living one
                "iterations": 0,
                "attributes": {path: hex_digest(found.digest) for path, found in held.items()},
                "content": {path: found.content for path, found in held.items() if found.content is not None},
            }
            self._known[loader] = known
        known["iterations"] += 1
        self._newest = known["index"]
        size = own.get("batch_size")
        self.samples, self.batch = length_of(dataset), size if type(size) is int else None
        self._whole = batches_of(loader) == 1
        self._items.begin(loader, known["index"], self.samples)
        step = self._state.next_step()
        about = {key: known[key] for key in ("iterations", "attributes", "content")}
        streams = self._state.world > 1 and is_a(dataset, IterableDataset)
        place = {"loader": known["index"], "iterations": known["iterations"], "began": step, "batches": 0}
        self._begun = place if streams else None
        split, line = self._splits.of(dataset), user_location()
        self._pairs.setdefault(known["index"], _Pairs(own.get("num_workers") or 0, line))
        self._announce(Loader(**_settings(loader), **about, indices=split, location=line, step=step), known["index"])
        self._look_at_generators(loader, known["iterations"], step)

    def _look_at_generators(self, loader: torch.utils.data.DataLoader[Any], passes: int, step: int) -> None:
        """Announce a generator that workers draw from: in one pass of several of them, or in several passes of one."""
        own = attributes_of(loader)
        workers = own.get("num_workers") or 0
        copies = workers if passes == 1 or own.get("persistent_workers") else workers * passes
        if self._copied is None and copies > 1 and passes <= 2 and torch.is_grad_enabled():
            self._copied = copied_generator(loader)
            if self._copied is not None:
                name, line = self._copied
                self._announce(RepeatedNumbers(step=step, workers=workers, name=name, location=line))

    def _subset_made(self, event: SubsetMade) -> None:
        """Note where a subset comes from: the split of an unseeded generator is another one on each rank."""
        self._splits.note(event.subset, event.location)

    def _workers_began(self, event: WorkersBegan) -> None:
        self._iterators[event.iterator] = None
        self._numbers[event.iterator] = self._newest
        if self._begun is not None:
            self._streams[event.iterator], self._begun = self._begun, None

    def _waits(self, _: BatchAwaited) -> None:
        self._asked = self._state.clock.now()

    def delivered(self, event: BatchDelivered) -> None:
        """Record a batch, and how long the training waited for it."""
        since = self._state.since
        waited = self._state.clock.now() - self._asked
        since.data_seconds += waited
        if torch.is_grad_enabled() and (number := self._numbers.get(event.iterator)) is not None:
            self._note_wait(waited, number)
        if (stream := self._streams.get(event.iterator)) is not None:
            stream["batches"] += 1
        tensors = [t for t in tensors_in(event.batch) if t.device.type == "cpu"]  # others would be waited for
        values = [fingerprint.sampled_fingerprint(t, RECORD_BYTES)[0] for t in tensors]
        deliveries = since.parts[Deliveries]
        deliveries.newest = combined(values)
        self._compare(event.iterator, deliveries.newest)
        if not self._whole:
            deliveries.tensors |= dict.fromkeys(values, deliveries.newest)

    def _compare(self, iterator: Any, value: int) -> None:
        """Count the batches that are the one before again, and announce how many of the first ones are."""
        number = self._numbers.get(iterator)
        pairs = None if number is None else self._pairs.get(number)
        if pairs is None or pairs.batches >= _PAIRS or self._whole:
            return
        pairs.again += bool(value) and value == pairs.newest
        pairs.batches, pairs.newest = pairs.batches + 1, value
        if pairs.batches == _PAIRS and pairs.again:
            told = RepeatedDeliveries(batches=_PAIRS, again=pairs.again, workers=pairs.workers, location=pairs.location)
            self._announce(replace(told, step=self._state.next_step()))

    def _note_wait(self, seconds: float, number: int) -> None:
        """Announce which loader training waits for, once it is clearly another one."""
        self._waited[number] = self._waited.get(number, 0.0) + seconds
        self._batches += 1
        if self._batches < self._enough:
            return
        waits, self._waited, self._batches = self._waited, {}, 0
        longest = max(waits, key=lambda number: waits[number])
        if self._awaited is not None:
            clearly = waits[longest] > _CLEARLY * waits.get(self._awaited, 0.0)  # never so for itself
            before, self._next = self._next, longest if clearly else None
            if not clearly or longest != before:
                return
        self._awaited, self._next = longest, None
        self._enough *= 2  # two that take turns are told ever more rarely
        self._announce(AwaitedLoader(loader=longest, step=self._state.next_step()))

    def _ended(self, event: EpochEnded) -> None:
        """Announce where a stream has ended: another rank's may go on."""
        stream = self._streams.pop(event.iterator)
        if stream is not None and not event.failed:
            self._announce(StreamEnded(**stream, step=self._state.next_step()))

    def workers(self) -> list[int]:
        """Return the process ids of the loaders' living workers."""
        return [pid for iterator in self._iterators.things() for pid in internals.worker_pids(iterator)]


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    sampler, given = sampler_of(loader), attributes_of(loader)
    own = attributes_of(sampler)
    distributed = is_a(sampler, DistributedSampler) or "num_replicas" in own
    settings: dict[str, Any] = {
        "sampler": type(sampler).__name__,
        "distributed": distributed,
        "length": length_of(given.get("dataset")),
        "batch_size": given.get("batch_size"),
        "batches": batches_of(loader),
        "workers": given.get("num_workers"),
        "prefetch": given.get("prefetch_factor"),
        "persistent": given.get("persistent_workers"),
        "pinned": given.get("pin_memory"),
        "dataset": source_of(given.get("dataset")),
    }
    for key, name in (("replicas", "num_replicas"), ("rank", "rank"), ("seed", "seed"), ("epoch", "epoch")):
        settings[key] = own.get(name) if distributed else None
    for key in ("shuffle", "drop_last"):
        settings[key] = own.get(key) if distributed else None
    return settings
