"""A model whose samples depend on each other is reported; one whose samples do not, or should, is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpdebug.forensics.counted_batch import batch_of
from ddpdebug.forensics.mixing_trial import look
from ddpdebug.forensics.sample_mixing import Mixing
from ddpdebug.isolation.child import Children
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.forward_capture import ForwardCapture, ForwardCaptures
from ddpdebug.schema.announcements import Announcement, SampleMixing

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
SIZE, LENGTH = 6, 9


class Model(nn.Module):
    """Makes rows of numbers of samples, and lets a test mix them."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.mixer, self.last = nn.Linear(4, 8), Mixer(mix), nn.Linear(8, 3)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.3)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return self.last(self.drop(self.norm(self.mixer(self.first(x)))))


class Mixer(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class Recurrent(nn.Module):
    """A recurrent layer over words, with one score a position or one for the whole."""

    def __init__(self, *, batch_first: bool, pooled: bool = False) -> None:
        super().__init__()
        self.words, self.layer, self.last = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=batch_first), nn.Linear(8, 3)
        self.pooled = pooled

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.layer(self.words(text))
        return self.last(states.mean(1) if self.pooled else states)


class Attention(nn.Module):
    """Attention over words with learned places, which a position-wise model of a language has."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.words, self.places, self.last = nn.Embedding(12, 8), nn.Embedding(LENGTH, 8), nn.Linear(8, 12)
        self.layer = nn.MultiheadAttention(8, 2, batch_first=batch_first)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places(torch.arange(text.shape[1]))
        return self.last(x + self.layer(x, x, x)[0])


def capture_of(model: nn.Module, *args: Any) -> ForwardCapture:
    torch.manual_seed(3)
    captures = ForwardCaptures(GUARD)
    captures.begin(model, args, {}, 4)
    model(*args)
    return captures.current[-1]


def found(model: nn.Module, *args: Any, loaded: int | None = None) -> SampleMixing | None:
    """Return what is told of a model that mixes samples."""
    capture = capture_of(model, *args)
    batch = batch_of(capture, loaded)
    fact = None if batch is None else look(capture, batch)
    return fact if fact is not None and fact.change > 0 else None


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def text() -> Tensor:
    return torch.randint(0, 12, (SIZE, LENGTH), generator=torch.Generator().manual_seed(1))


def places(x: Tensor) -> Tensor:
    return x + torch.arange(len(x))[:, None] * torch.arange(8).cos()


@pytest.mark.parametrize(
    "mix, operation",
    [
        (lambda x: x.softmax(0), "softmax"),
        (lambda x: x - x.mean(0), "sub"),
        (places, "add"),
        (lambda x: x.t().reshape(len(x), -1), "clone"),
        (lambda x: x.cumsum(0), "cumsum"),
        (lambda x: x + x.roll(1, 0), "roll"),
    ],
)
def test_the_operation_that_mixes_is_named(mix: Callable[[Tensor], Tensor], operation: str) -> None:
    """With its module and its line."""
    fact = found(Model(mix), numbers(SIZE, 4))
    assert fact is not None
    assert fact.module == "mixer"
    assert fact.samples == SIZE
    if operation not in {"clone", "roll"}:  # made of several
        assert fact.operation == operation
    assert fact.location is not None
    assert fact.location.startswith("test_sample_mixing.py:") or "/test_sample_mixing.py:" in fact.location


@pytest.mark.parametrize(
    "mix", [lambda x: x, lambda x: x.softmax(-1), lambda x: x - x.mean(1, keepdim=True), lambda x: x.flip(0).flip(0)]
)
def test_independent_samples(mix: Callable[[Tensor], Tensor]) -> None:
    """What works on each row by itself, or puts the rows back."""
    assert found(Model(mix), numbers(SIZE, 4)) is None


def test_batch_normalisation_has_its_statistics() -> None:
    """In eval mode it uses those that were kept; without such it was told to mix."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    assert found(model, numbers(SIZE, 4)) is None
    assert found(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), numbers(SIZE, 4)) is None


def test_what_is_one_sequence_may_be_no_batch() -> None:
    """A recurrent layer takes (time, features) as well; where a loader's batches are as large, it is a batch."""
    layer = nn.Sequential(nn.GRU(4, 8), _First(), nn.Linear(8, 2))
    assert found(layer, numbers(SIZE, 4)) is None
    assert found(layer, numbers(SIZE, 4), loaded=SIZE) is not None


class _First(nn.Module):
    def forward(self, given: Any) -> Tensor:
        return given[0]


def test_time_may_come_first() -> None:
    """Without a loader scores at every position may be (time, batch); pooled ones and a loader's are not."""
    sequence = text()
    assert found(Recurrent(batch_first=False), sequence) is None
    assert found(Recurrent(batch_first=False), sequence, loaded=SIZE) is not None
    assert found(Recurrent(batch_first=False, pooled=True), sequence) is not None
    for pooled in (False, True):
        assert found(Recurrent(batch_first=True, pooled=pooled), sequence, loaded=SIZE) is None


def test_a_model_that_mixes_both_ways() -> None:
    """It has no dimension of independent samples at all."""
    fact = found(Attention(batch_first=False), text())
    assert fact is not None
    assert fact.module == "layer"
    assert found(Attention(batch_first=True), text()) is None


def test_what_is_no_batch_is_not_asked() -> None:
    """Graphs, tables of samples against samples, models that draw, and few samples."""
    edges = torch.randint(0, SIZE, (2, 14))
    everything = Model(lambda x: x - x.mean(0))
    assert batch_of(capture_of(everything, numbers(SIZE, 4), edges), None) is None
    assert batch_of(capture_of(everything, numbers(SIZE, 4), numbers(SIZE, SIZE)), None) is None
    assert batch_of(capture_of(everything, numbers(3, 4)), None) is None
    assert batch_of(capture_of(everything, numbers(SIZE, 4), object()), None) is None
    assert found(Model(lambda x: x + torch.randn_like(x)), numbers(SIZE, 4)) is None
    similar = nn.Sequential(nn.Linear(4, 8), _Table())
    assert found(similar, numbers(SIZE, 4)) is None


class _Table(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


def _ask(given: Callable[[int], Tensor]) -> list[int | None]:
    told: list[Announcement] = []
    children = Children(GUARD)
    mixing = Mixing(children, GUARD, lambda fact, number=None: told.append(fact), lambda: True)
    model = Model(lambda x: x - x.mean(0))
    for step in range(8):
        captures = ForwardCaptures(GUARD)
        captures.begin(model, (given(step),), {}, step)
        model(given(step))
        mixing.loss(captures.current[-1], None)
        mixing.work(step)
        children.finish(60)
    return [fact.step for fact in told if isinstance(fact, SampleMixing)]


def test_a_model_is_asked_once() -> None:
    """When its inputs have changed: what never changes may be the nodes of one graph."""
    assert _ask(lambda step: numbers(SIZE, 4) + step) == [3]
    assert _ask(lambda _: numbers(SIZE, 4)) == []
