"""Where the time of a step goes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from preflight_subjects import batches, cross_entropy, network, state_of, subject
from torch import nn

from ddpdebug.preflight.checks import throughput
from ddpdebug.preflight.checks.throughput import check
from ddpdebug.preflight.output.results import Check, Status


@pytest.fixture(autouse=True)
def all_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show every operation: which eight take longest depends on the machine."""
    monkeypatch.setattr(throughput, "_SHOWN", 1000)


def measured(**changes: Any) -> Check:
    given = subject(**changes)
    before = state_of(given)
    (found,) = check(given, seconds=1.0)
    assert state_of(given) == before
    return found


def test_operations_are_counted() -> None:
    """The numbers of the operations are those of the model: two linear layers are two addmm."""
    found = measured()
    calls = {row[0]: row[1] for row in found.tables[0].rows}
    assert found.status is Status.INFO
    assert found.evidence["operations"] == sum(calls.values())
    assert calls["aten.addmm.default"] == 2
    assert found.evidence["device_copies"] == found.evidence["values_read"] == 0
    assert f"runs {found.evidence['operations']} operations" in found.summary


def test_micro_batches_are_one_step() -> None:
    """Twice the batches, twice the forwards."""
    calls = {row[0]: row[1] for row in measured(micro_batches=3).tables[0].rows}
    assert calls["aten.addmm.default"] == 6


def test_values_that_are_read_are_counted() -> None:
    """Each of them would wait for a device."""

    def reading(model: nn.Module, batch: Any) -> Any:
        loss, out = cross_entropy(model, batch)
        return loss * (1.0 if loss.item() > 0 else out.max().item()), out

    assert measured(loss_of=reading).evidence["values_read"] == 1


class Fake:
    """Gives batches after a while; says how many it has given."""

    def __init__(self, seconds: float, many: int = 1000) -> None:
        self.given, self._seconds, self._many = 0, seconds, many

    def __call__(self) -> Iterator[Any]:
        for batch in itertools.islice(itertools.cycle(batches()), self._many):
            if self._seconds:
                time.sleep(self._seconds)
            self.given += 1
            yield batch


def test_the_pipeline_is_timed_between_batches() -> None:
    """What a batch takes is what the pipeline takes; micro-batches take it each."""
    found = measured(make_batches=Fake(0.03), micro_batches=2)
    assert found.evidence["data_seconds"] >= 0.06
    assert "no workers, the step waits" in found.summary
    assert found.summary.startswith("the own time of a step is ")


@pytest.mark.parametrize(
    "step, data, workers, share",
    [
        (0.01, 0.03, 0, 0.75),
        (0.01, 0.03, 2, 0.667),
        (0.05, 0.01, 0, 0.167),
        (0.03, 0.01, 0, 0.25),
        (0.03, 0.038, 2, 0.211),
        (0.03, 0.02, 2, 0.0),
        (0.0001, 0.0003, 0, 0.75),
    ],
)
def test_waiting_for_data_is_a_warning_when_it_is_long(step: float, data: float, workers: int, share: float) -> None:
    """Workers make the next batch during the step; below ten milliseconds nobody is warned."""
    found = throughput._verdict(step, throughput.Counts(), data, workers)
    assert found.evidence["share"] == pytest.approx(share, abs=1e-3)
    wait = found.evidence["step_seconds"] - found.evidence["model_seconds"]
    assert wait == pytest.approx(share * found.evidence["step_seconds"], rel=0.01)
    slow = share >= 0.2 and wait >= 0.01
    assert (found.status, found.code) == ((Status.WARN, "SLOW602") if slow else (Status.INFO, ""))
    assert bool(found.actions) is bool(found.hypotheses) is slow
    assert f"{100 * share:.0f} % of each step waits for data" in found.summary
    if slow:
        assert ("num_workers is 0" in found.actions[0]) is not bool(workers)


def test_a_quick_pipeline_is_no_warning() -> None:
    """However short the step is; and it is not read further than needed."""
    quick = Fake(0.0)
    found = measured(make_batches=quick)
    assert found.status is Status.INFO
    assert quick.given <= 24
    assert "its data takes" in found.summary


@pytest.mark.parametrize("many", [0, 1])
def test_a_pipeline_that_ends_at_once_is_not_known(many: int) -> None:
    """The step is timed all the same."""
    found = measured(make_batches=Fake(0.0, many))
    assert "its share is not known" in found.summary
    assert found.evidence["data_seconds"] is None


def test_without_an_optimizer_or_trainable_parameters_a_step_is_timed() -> None:
    """And without batches nothing is."""
    assert measured(optimizer_for=None).evidence["operations"] > 10
    assert measured(batches=[]).status is Status.SKIPPED
    frozen = network().requires_grad_(False)

    def loss_of(model: nn.Module, batch: Any) -> Any:
        return torch.zeros(1, requires_grad=True).sum() + model(batch[0]).sum(), None

    assert measured(model=frozen, optimizer_for=None, loss_of=loss_of).evidence["operations"] > 3
