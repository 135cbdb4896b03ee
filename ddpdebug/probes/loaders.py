"""What the DataLoader delivers and how its sampler is set up: shards must differ, everything else must agree."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.user_code import is_user_file, is_users, shorten
from ddpdebug.nested import tensors_in
from ddpdebug.probes.record import Part, StepRecord, combined
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import BatchAwaited, BatchDelivered, Bus, EpochBegan, WorkersBegan
from ddpdebug.schema.announcements import Announce, IndexList, Loader
from ddpdebug.schema.details import hex_digest

_RECORD_BYTES = 1 << 18
_MAX_DEPTH = 3
_MAX_ITEMS = 200_000
_BUDGET_BYTES = 32 << 20


@dataclass(slots=True)
class Deliveries(Part, key="probe:loader"):
    """Digests of the batches that came out of a DataLoader."""

    newest: int = 0  # not yet fed to a training forward
    fed: list[int] = field(default_factory=list)

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return one digest of what was fed."""
        return {"record_digest": combined(self.fed)}


class Loaders:
    """Watches every DataLoader of the process, numbered in order of first use."""

    def __init__(self, bus: Bus, state: StepState, announce: Announce) -> None:
        self._state, self._announce = state, announce
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known: weakref.WeakKeyDictionary[DataLoader[Any], dict[str, Any]] = weakref.WeakKeyDictionary()
        self._asked = time.perf_counter()
        self.samples: int | None = None  # in the data set over which an epoch was begun last
        bus.on("probe:loader", EpochBegan, self.begin)
        bus.on("probe:loader", WorkersBegan, self._workers_began)
        bus.on("probe:loader", BatchAwaited, self._waits)
        bus.on("probe:loader", BatchDelivered, self.delivered)

    @property
    def repeated(self) -> bool:
        """Tell whether a second epoch has begun over some loader."""
        return any(known["iterations"] > 1 for known in list(self._known.values()))

    def begin(self, event: EpochBegan) -> None:
        """Note the start of an epoch."""
        loader = event.loader
        known = self._known.get(loader)
        if known is None:
            known = {"index": len(self._known), "iterations": 0, "attributes": dict(_attributes(loader.dataset))}
            self._known[loader] = known
        known["iterations"] += 1
        self.samples = _length(loader.dataset)
        step = self._state.next_step()
        told = Loader(**_settings(loader), iterations=known["iterations"], attributes=known["attributes"], step=step)
        self._announce(told, known["index"])

    def _workers_began(self, event: WorkersBegan) -> None:
        self._iterators.add(event.iterator)

    def _waits(self, _: BatchAwaited) -> None:
        self._asked = time.perf_counter()

    def delivered(self, event: BatchDelivered) -> None:
        """Note a batch and how long the training waited for it."""
        since = self._state.since
        since.data_seconds += time.perf_counter() - self._asked
        values = [fingerprint.sampled_fingerprint(t, _RECORD_BYTES)[0] for t in tensors_in(event.batch)]
        since.parts[Deliveries].newest = combined(values)

    def workers(self) -> list[int]:
        """Return the process ids of the loaders' living workers."""
        return [pid for iterator in list(self._iterators) for pid in internals.worker_pids(iterator)]


def _source(dataset: Any) -> str | None:
    """Return the class of the user's data set and where its items are made."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    made = getattr(type(dataset), "__getitem__", None) or getattr(type(dataset), "__iter__", None)
    code = getattr(made, "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return None
    return f"{type(dataset).__name__} at {shorten(code.co_filename)}:{code.co_firstlineno}"


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    sampler: Any = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    sampler = loader.sampler if sampler is None else sampler
    distributed = isinstance(sampler, DistributedSampler) or hasattr(sampler, "num_replicas")
    settings: dict[str, Any] = {
        "sampler": type(sampler).__name__,
        "distributed": distributed,
        "length": _length(loader.dataset),
        "batch_size": loader.batch_size,
        "batches": _batches(loader),
        "indices": _indices(loader.dataset),
        "workers": loader.num_workers,
        "dataset": _source(loader.dataset),
    }
    for key, name in (("replicas", "num_replicas"), ("rank", "rank"), ("seed", "seed"), ("epoch", "epoch")):
        settings[key] = getattr(sampler, name, None) if distributed else None
    for key in ("shuffle", "drop_last"):
        settings[key] = getattr(sampler, key, None) if distributed else None
    return settings


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError as error:
        if is_users(error):
            raise
        return None


def _batches(loader: DataLoader[Any]) -> int | None:
    """Return how many batches a loader says that it has; None where that would ask a class of the user's."""
    whole = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    asked: list[Any] = [getattr(type(thing), "__len__", None) for thing in (loader, whole)]
    if type(whole) is BatchSampler:
        asked.append(getattr(type(whole.sampler), "__len__", None))
    shipped = all(str(getattr(how, "__module__", "builtins")).startswith(("torch.", "builtins")) for how in asked)
    # an IterableDataset's loader remembers the answer, and warns where it is exceeded
    return _length(loader) if shipped and not isinstance(loader.dataset, IterableDataset) else None


def _indices(dataset: Any) -> IndexList | None:
    if not isinstance(dataset, Subset):
        return None
    indices = list(dataset.indices)[:_MAX_ITEMS]
    return IndexList(digest=hex_digest(fingerprint.of_text(repr(indices))), length=len(indices))


def _attributes(dataset: Any, prefix: str = "dataset", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (attribute path, digest) of the plain data that a dataset holds; nothing of the dataset's code runs."""
    budget = _BUDGET_BYTES
    if depth > _MAX_DEPTH or not hasattr(dataset, "__dict__"):
        return
    for name, value in sorted(vars(dataset).items()):
        path = f"{prefix}.{name}"
        digest, size = _digest(value)
        budget -= size
        if budget < 0:
            return
        if digest is not None:
            yield path, f"{digest:016x}"
        elif isinstance(value, torch.utils.data.Dataset):
            yield from _attributes(value, path, depth + 1)


def _digest(value: Any) -> tuple[int | None, int]:
    """Return (digest, bytes looked at) of plain data, or (None, 0) for anything else."""
    if isinstance(value, torch.Tensor):
        return fingerprint.sampled_fingerprint(value, 1 << 20)[0], min(value.nbytes, 1 << 20)
    if isinstance(value, bool | int | float | str):
        return fingerprint.of_text(repr(value)), 8
    if not isinstance(value, dict | list | tuple) or not 0 < len(value) <= _MAX_ITEMS:
        return None, 0
    items = [*value, *value.values()] if isinstance(value, dict) else value
    if all(isinstance(item, torch.Tensor) for item in items):
        return fingerprint.combine([fingerprint.glance(item) for item in items[:64]]), 1 << 12
    if not all(_is_plain(item) for item in items):
        return None, 0
    text = repr(value)
    return fingerprint.of_text(text), len(text)


def _is_plain(item: Any) -> bool:
    if isinstance(item, tuple | list):
        return len(item) <= 8 and all(isinstance(part, bool | int | float | str) for part in item)
    return item is None or isinstance(item, bool | int | float | str)
