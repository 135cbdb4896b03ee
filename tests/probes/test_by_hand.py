"""Programs that update their parameters without an optimizer: where a step ends, and what is seen of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.step_digests import GradientDigests, ParameterDigests

Update = Callable[[nn.Module], None]


class _Attached:
    """Probes of one process, with the records that they hand over."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
        self.probes = Probes(self.guard, self.records.append, lambda *_: None, lambda *_: True)


@pytest.fixture
def attached() -> Iterator[_Attached]:
    """Attach to this process until the test ends."""
    made = _Attached()
    made.probes.patches.install()
    yield made
    made.probes.remove()
    made.probes.release()


def _in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.sub_(0.1 * p.grad)


def _through_data(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.data.add_(p.grad, alpha=-0.1)


def _assigned(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.data = p.data - 0.1 * p.grad


def _vector(model: nn.Module) -> None:
    gradient = nn.utils.parameters_to_vector(p.grad for p in model.parameters() if p.grad is not None)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector - 0.1 * gradient, model.parameters())


def _train(model: nn.Module, update: Update | None, steps: int = 5, parts: int = 1) -> None:
    for _ in range(steps):
        for _ in range(parts):
            model(torch.randn(8, 4)).square().mean().backward()
        if update is not None:
            update(model)
        model.zero_grad()


@pytest.mark.parametrize("update", [_in_place, _through_data, _assigned, _vector])
@pytest.mark.parametrize("parts", [1, 3])
def test_every_update_is_a_step(update: Update, parts: int, attached: _Attached) -> None:
    """However it is written; backwards whose gradients are added up belong to one step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    _train(model, update, parts=parts)
    attached.probes.recorder.end_by_hand()
    assert [record.step for record in attached.records] == list(range(5))
    assert [record.fields["micro_batches"] for record in attached.records] == [parts] * 5
    assert attached.records[0].names == ["0.bias", "0.weight", "1.bias", "1.weight"]
    gradients = [record.parts[GradientDigests].table() for record in attached.records]
    assert all(len(set(table.values())) == 4 for table in gradients)
    after = [record.parts[ParameterDigests].after for record in attached.records]
    assert len({tuple(digests()) for digests in after if digests is not None}) == 5


def test_without_an_update_there_is_no_step(attached: _Attached) -> None:
    """Gradients of the input, saliency, a loop that has forgotten to update: nothing is trained."""
    model = nn.Linear(4, 2)
    _train(model, None)
    attached.probes.recorder.end_by_hand()
    assert attached.records == []
    assert attached.probes.recorder.by_hand == 0


def test_evaluation_does_not_end_a_step(attached: _Attached) -> None:
    """A forward without gradients between backward and update."""
    model = nn.Linear(4, 2)
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        with torch.no_grad():
            model(torch.randn(8, 4))
        _in_place(model)
        model.zero_grad()
    attached.probes.recorder.end_by_hand()
    assert len(attached.records) == 3


@pytest.mark.parametrize("late", [False, True])
def test_with_an_optimizer_its_steps_are_the_steps(late: bool, attached: _Attached) -> None:
    """What else changes the parameters is no step; an optimizer that comes later goes on with the count."""
    model = nn.Linear(4, 2)
    if late:
        _train(model, _in_place, steps=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight.clamp_(-1, 1)
    steps = [record.step for record in attached.records]
    assert steps == list(range(len(steps)))
    assert len(steps) == (5 if late else 3)
    assert {record.optimizer for record in attached.records} == {0}


def test_nothing_is_kept_alive_or_changed(attached: _Attached) -> None:
    """A model goes with its last reference, and the next one is seen."""
    for width in (2, 3):
        model = nn.Linear(4, width)
        _train(model, _in_place, steps=2)
        attached.probes.recorder.end_by_hand()
        assert not model._forward_hooks
        weight = weakref.ref(model.weight)
        del model
        assert weight() is None
    assert [len(record.ids) for record in attached.records] == [2, 2, 2, 2]
    assert attached.probes.state.models() == []
