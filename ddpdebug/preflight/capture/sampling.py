"""Samples of the training and validation data, drawn from the script's own loaders."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddpdebug.clock import time
from ddpdebug.isolation.process_state import preserved
from ddpdebug.nested import cloned, mapped
from ddpdebug.preflight.capture.copies import loader_restorer
from ddpdebug.preflight.sandbox.time_limit import time_limit

#: Samples of each data set: enough for statistics to some percent and for a probe of labels and inputs.
SAMPLES = 512
#: Validation samples that are read twice; one that changes is proof.
REPEATS = 8
_SECONDS = 10.0


@dataclass(slots=True)
class Samples:
    """Raw samples, before collation.

    Args:
        train: samples of the data set that the script trains on.
        validation: of another one that it has made a loader for.
        repeats: pairs of the same validation sample, read twice.
        trouble: why there are none.
    """

    train: list[Any] = field(default_factory=list)
    validation: list[Any] = field(default_factory=list)
    repeats: list[tuple[Any, Any]] = field(default_factory=list)
    trouble: str | None = None
    _made: list[Any] = field(default_factory=list)
    _read: list[Any] = field(default_factory=list)

    def made(self, loader: Any) -> None:
        """Register a loader that the script has made."""
        self._made.append(loader)

    def read(self, loader: Any) -> None:
        """Register a loader that the script begins to iterate."""
        if all(loader is not known for known in self._read):
            self._read.append(loader)

    def training(self) -> Any | None:
        """Return the training loader: the last one that the script began to iterate."""
        return self._read[-1] if self._read else None

    def others(self) -> list[Any]:
        """Return the loaders over other data sets than the training loader's."""
        own = self.training()
        return [loader for loader in self._made if own is not None and loader.dataset is not own.dataset]

    def facts(self) -> list[dict[str, Any]]:
        """Return the settings of the loaders as JSON values."""
        return [
            _facts(loader, trains=loader is self.training()) for loader in self._made if isinstance(loader, DataLoader)
        ]

    def draw(self) -> None:
        """Read samples from the data sets; record their exceptions, and restore random states."""
        own, others = self.training(), self.others()
        restores = [loader_restorer(loader) for loader in self._made]
        try:
            with preserved(plain=True), time_limit(_SECONDS):
                if own is not None:
                    self.train = _spread(own.dataset, SAMPLES)
                if others:
                    self.validation = _spread(others[0].dataset, SAMPLES)
                    data = others[0].dataset
                    self.repeats = [(_sample(data, at), _sample(data, at)) for at in _places(data, REPEATS)]
        except Exception as error:  # noqa: BLE001 - the script's own data set
            self.trouble = f"{type(error).__name__}: {error}"
        finally:
            for restore in restores:
                restore()


def _places(dataset: Any, count: int) -> Sequence[int]:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return ()
    size = len(dataset)
    step = max(1, size // count)
    return range(0, size, step)[:count]


def _spread(dataset: Any, count: int) -> list[Any]:
    """Read samples all over a data set, for as long as that is quick."""
    samples: list[Any] = []
    end = time.monotonic() + _SECONDS / 3
    places = _places(dataset, count)
    # in another order, so that the first ones are from all over the data set
    for at in random.Random(0).sample(places, len(places)):  # noqa: S311 - an order, no secret
        samples.append(_sample(dataset, at))
        if time.monotonic() > end:
            break
    return samples


def _sample(dataset: Any, at: int) -> Any:
    """Return a copy of a sample, with tensors in the place of arrays."""
    return cloned(mapped(dataset[at], _as_tensor, kinds=True))


def _as_tensor(item: Any) -> Any:
    numeric = type(item).__module__ == "numpy" and getattr(getattr(item, "dtype", None), "kind", "") in "biuf"
    return torch.as_tensor(item) if numeric else item


def _facts(loader: Any, *, trains: bool) -> dict[str, Any]:
    return {
        "trains": trains,
        "batch_size": loader.batch_size,
        "workers": loader.num_workers,
        "generator": loader.generator is not None,
        "worker_init": loader.worker_init_fn is not None,
    }
