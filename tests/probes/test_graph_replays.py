"""Optimizer steps in CUDA graphs are counted as they are replayed: nobody sees them. No graph is made here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.coverage import CoverageProbe


class Graph(torch.cuda.CUDAGraph):
    """A graph that is none."""

    def __new__(cls) -> Graph:  # noqa: PYI034 - there is no subclass
        """Ask no device."""
        return object.__new__(cls)

    def __init__(self) -> None:
        """Likewise."""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[CoverageProbe]:
    """What counts the steps of this process."""
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda graph: None)
    guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
    probes = Probes(guard, lambda _: None, lambda *_, **__: None, lambda *_: False)
    counts = CoverageProbe(probes.bus, probes.entries, probes.state.wrappers, lambda _: None)
    probes.patches.install()
    counts.install()
    yield counts
    probes.remove()
    probes.release()


def test_steps_in_graphs_are_counted(counts: CoverageProbe) -> None:
    """As many as each graph holds, in each replay; a graph of a forward alone holds none."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    step()
    two, forward = Graph(), Graph()
    two.capture_begin()
    step()
    step()
    two.capture_end()
    forward.capture_begin()
    model(torch.ones(1, 1))
    forward.capture_end()
    assert (counts.made, counts.replayed) == (1, 0)
    for _ in range(3):
        two.replay()
        forward.replay()
    step()
    assert (counts.made, counts.replayed) == (2, 6)
