"""What the job lets go is gone: nothing of ddpdebug holds its gradients, batches or graphs beyond their step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ddpdebug import fingerprint
from ddpdebug.probes import device
from ddpdebug.probes.guard import Guard
from ddpdebug.probes.loaders import Loaders
from ddpdebug.probes.patches import Patches
from ddpdebug.probes.record import StepRecord, encode_row
from ddpdebug.probes.recorder import Recorder


class Watched:
    """The probes of one process, checking every step; the records stay, as in the monitor's ring."""

    def __init__(self) -> None:
        self.troubles: list[str] = []
        self.records: list[StepRecord] = []
        self.guard = Guard(lambda part, message: self.troubles.append(f"{part}: {message}"))
        self.recorder = Recorder(self.guard, self._emit, lambda *_: None, lambda *_: True, 1)
        self.patches = Patches(self.recorder, Loaders(self.recorder, lambda *_: None), lambda: None)
        self.recorder.adopt = self.patches.adopt

    def _emit(self, record: StepRecord) -> None:
        self.records.append(record)
        encode_row(record, 0)


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    found.patches.install()
    try:
        yield found
    finally:
        found.patches.remove()
        found.recorder.release()
    assert found.troubles == []


@pytest.mark.parametrize("clip", [False, True])
def test_gradients_of_finished_steps(watched: Watched, clip: bool) -> None:
    """The records of finished steps hold numbers, whatever was done to the gradients before the step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone: list[Any] = []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        gone += [p.grad.untyped_storage()._weak_ref() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    optimizer.zero_grad()
    assert len(watched.records) == 4
    assert [torch.UntypedStorage._expired(ref) for ref in gone] == [True] * len(gone)


class Far(torch.Tensor):
    """Stands in for a tensor on a device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


@pytest.mark.parametrize("kind", [torch.Tensor, Far])
def test_digests_hold_no_tensor(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read later of tensors, on a device as well, does not keep them."""
    monkeypatch.setattr(device, "_detached_copy", lambda made: (made, lambda: None))
    monkeypatch.setattr(fingerprint, "device_fingerprints", lambda some: torch.arange(1, len(some) + 1))
    tensors = [torch.ones(3), torch.zeros(2).as_subclass(kind)]
    refs = [weakref.ref(t) for t in tensors]
    later = device.digests(tensors)
    del tensors
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert len(later()) == 2
