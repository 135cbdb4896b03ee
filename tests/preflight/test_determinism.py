"""Seeds that are missing, and runs that part: the operation, the module and the line."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from preflight_subjects import cross_entropy, network, state_of, subject
from torch import nn

from ddpdebug.isolation.guard import Guard
from ddpdebug.preflight.capture.seed_watch import SeedWatch
from ddpdebug.preflight.checks.determinism import check
from ddpdebug.preflight.output.results import Check, Status
from ddpdebug.probes.entries import Entries

COUNT = itertools.count(1)


class OwnNoise(nn.Module):
    """Draws from a generator that nobody seeds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.from_numpy(numpy.random.default_rng().standard_normal(16))
        return x.sin() + noise.to(x)  # the line


class Counting(torch.autograd.Function):
    """Has a backward that is never the same twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 + 1e-3 * next(COUNT))


class CountingBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Counting.apply(x)  # the other line


def line_with(words: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{Path(__file__).name}:{next(i for i, line in enumerate(lines, 1) if line.endswith(words))}"


def runs(**changes: Any) -> Check:
    given = subject(**changes)
    before = state_of(given)
    found = check(given)
    assert state_of(given) == before
    return found[1]


def drawing(model: nn.Module, batch: Any) -> Any:
    """A loss that draws from all global generators."""
    factor = random.random() + float(numpy.random.rand())  # noqa: NPY002 - the global generator
    noisy = (batch[0] + factor * torch.randn_like(batch[0]), batch[1])
    batch[0].zero_()
    return cross_entropy(model, noisy)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer_for": None},
        {"model": network(nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5)), "loss_of": drawing},
    ],
)
def test_global_generators_make_no_difference(changes: dict[str, Any]) -> None:
    """Dropout, noise and statistics are the same from the same state."""
    found = runs(**changes)
    assert (found.status, found.code) == (Status.PASS, "")
    assert found.evidence["steps"] >= 2


def test_the_operation_in_the_forward_is_named() -> None:
    """With its module and the user's line."""
    found = runs(model=network(OwnNoise()))
    assert (found.status, found.code) == (Status.INFO, "RCP815")
    assert found.evidence["module"] == "1"
    assert found.evidence["step"] == 0
    assert line_with("# the line") in found.evidence["lines"][0]
    assert line_with("# the line") in found.summary


def test_the_operation_in_the_backward_is_named() -> None:
    """With the module and line of its forward, although no frame of the model's is on the stack."""
    found = runs(model=network(CountingBackward()))
    assert found.code == "RCP815"
    assert found.evidence["operation"] == "aten.mul.Tensor"
    assert found.evidence["module"] == "1"
    assert "backward of module 1" in found.summary
    assert found.evidence["loss"] == found.evidence["loss_again"]


def test_another_path_through_the_model_is_named() -> None:
    """Where the second run calls another operation than the first, both are told."""
    flips = itertools.count()

    def loss_of(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        even = (next(flips) // 1) % 2 == 0
        out = out.sin() if even else out.cos()
        return torch.nn.functional.cross_entropy(out, batch[1]), out

    found = runs(loss_of=loss_of, batches=subject().batches[:1])
    assert found.code == "RCP815"
    assert {"aten.sin.default", "aten.cos.default"} <= set(found.summary.replace(",", " ").replace(")", " ").split())


def test_a_difference_that_does_not_come_back_is_told_as_such() -> None:
    """The first two runs part, the search sees nothing."""
    calls = itertools.count()

    def loss_of(model: nn.Module, batch: Any) -> Any:
        loss, out = cross_entropy(model, batch)
        return loss * (2.0 if next(calls) == 0 else 1.0), out

    assert "did not show again" in runs(loss_of=loss_of).summary


def test_slow_runs_are_shorter() -> None:
    """A third step is not begun when the time is over."""

    def slow(model: nn.Module, batch: Any) -> Any:
        time.sleep(0.02)
        return cross_entropy(model, batch)

    (_, found) = check(subject(loss_of=slow), seconds=0.001)
    assert found.evidence["steps"] < 3


@contextlib.contextmanager
def watched_seeds() -> Iterator[dict[str, str]]:
    entries = Entries(Guard(lambda part, text: pytest.fail(f"{part}: {text}")))
    watch = SeedWatch(entries)
    yield watch.begin()
    watch.end()
    entries.close()


def table(found: Check) -> dict[str, str]:
    return {row[0]: row[1] for row in found.tables[0].rows}


def test_what_a_script_seeds_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the functions that it calls, with the line; a seed from the system is none."""
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    before = [random.seed, numpy.random.seed, torch.manual_seed]
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - the global generator
    with watched_seeds() as seeded:
        random.seed()
        numpy.random.seed(4)  # noqa: NPY002 - the global generator
        torch.manual_seed(4)
    assert [random.seed, numpy.random.seed, torch.manual_seed] == before
    assert "random" not in seeded
    assert seeded.keys() >= {"numpy", "torch"}
    loaders = [{"trains": True, "workers": 2, "generator": False, "worker_init": False}]
    (seeds, _) = check(subject(facts={"seeded": seeded, "loaders": loaders}))
    random.setstate(states[0])
    numpy.random.set_state(states[1])  # noqa: NPY002 - the global generator
    torch.set_rng_state(states[2])
    rows = table(seeds)
    assert (seeds.status, seeds.code) == (Status.INFO, "RCP815")
    assert rows["Python's generator"] == "not seeded"
    assert rows["numpy's global generator"] == rows["torch, CPU"] == "seeded"
    assert rows["PYTHONHASHSEED"] == "set to 3"
    assert rows["DataLoader, generator"] == "torch's"
    assert rows["DataLoader, workers"] == "2"


def test_a_generator_that_nobody_draws_from_needs_no_seed() -> None:
    """It is known when the script has ended."""
    states = random.getstate(), numpy.random.get_state()  # noqa: NPY002 - the global generator
    with watched_seeds() as seeded:
        numpy.random.rand()  # noqa: NPY002 - as above
    random.setstate(states[0])
    numpy.random.set_state(states[1])  # noqa: NPY002 - as above
    (seeds, _) = check(subject(facts={"seeded": seeded}))
    assert table(seeds)["Python's generator"] == "not used"
    assert table(seeds)["numpy's global generator"] == "not seeded"
    assert "Python" not in seeds.summary


def test_all_seeded_is_in_order() -> None:
    """And without having watched, only torch's generator is judged."""
    (seeds, _) = check(subject(facts={"seeded": {"random": "a.py:1", "numpy": "a.py:2", "torch": "a.py:3"}}))
    assert (seeds.status, seeds.code) == (Status.PASS, "")
    (unknown, _) = check(subject())
    assert table(unknown)["Python's generator"] == "unknown"
