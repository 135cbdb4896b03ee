"""By which number of its own a rank divides its loss, read from the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from ddpdebug.probes.training_loop.loss_graph import terms
from ddpdebug.probes.training_loop.targets import Targets

_LABELS = torch.tensor([[1, 2, 0, 1], [2, 1, 0, 0]])
_MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])


def _each(scores: torch.Tensor) -> torch.Tensor:
    """One number for each label, in the form of the labels, as a language model's loss has it."""
    return functional.cross_entropy(scores.transpose(1, 2), _LABELS, reduction="none")


def _mean(scores: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), _LABELS.masked_fill(_MASK == 0, -100).flatten())


def _flat(scores: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), _LABELS.flatten(), reduction="none")


_LOSSES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "a mask, and its sum": (lambda s: (_each(s) * _MASK).sum() / _MASK.sum(), 5),
    "a mask, in the form of the labels": (lambda s: (_flat(s).view(2, 4) * _MASK).sum() / _MASK.sum(), 5),
    "divided by the world once more": (lambda s: (_each(s) * _MASK).sum() / _MASK.sum() / 2, 10),
    "labels that do not count": (_mean, 5),
    "labels that do not count, of a micro-batch": (lambda s: _mean(s) / 4, 20),
    "a mean over what counts everywhere": (lambda s: _mean(s) * (5 * 2 / 16), 8),
    "the number everywhere": (lambda s: (_each(s) * _MASK).sum() * 2 / 16, 8),
    "nothing but a sum": (lambda s: (_each(s) * _MASK).sum(), 0),
    "a mean beside another term": (lambda s: _mean(s) * 2 + s.square().sum(), 0),
}


@pytest.mark.parametrize("name", _LOSSES)
def test_the_number_that_a_loss_is_divided_by(name: str) -> None:
    """The product of all that stands between the sum over labels and the loss; 0 where it is not known."""
    make, number = _LOSSES[name]
    known, told = Targets(), None
    for _ in range(16):
        loss = make(torch.randn(2, 4, 3, requires_grad=True))
        told = known.read(terms(loss, by_scaler=False), loss, {2}, by_scaler=False)
    assert told is not None
    assert told.numbers == pytest.approx([number] * 16)
