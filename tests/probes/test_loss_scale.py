"""With which weight the losses of a step reach the gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from ddpdebug.probes.loop_calls import kind_of
from ddpdebug.probes.training_loop.loss_graph import terms
from ddpdebug.probes.training_loop.loss_scale import LossScale, Reduced
from ddpdebug.schema.details import Accumulation

Loss = Callable[[torch.Tensor, int], torch.Tensor]
_LABELS = torch.tensor([0, 1, 2, 1, 0, 2])


def mean(x: torch.Tensor, number: int) -> torch.Tensor:
    """Average over the labels."""
    del number
    return functional.cross_entropy(x, _LABELS)


def masked(x: torch.Tensor, number: int) -> torch.Tensor:
    """Average over another number of elements in each micro-batch, by hand."""
    mask = (torch.arange(x.numel()) <= 4 * number + 3).float().reshape(x.shape)
    return (x.square() * mask).sum() / mask.sum()


def ignoring(x: torch.Tensor, number: int) -> torch.Tensor:
    """Average over more and more labels."""
    return functional.cross_entropy(x, _LABELS.where(torch.arange(6) <= number, -100))


def of_all(x: torch.Tensor, number: int) -> torch.Tensor:
    """Sum over labels, and divide by the number of all micro-batches' labels."""
    del number
    return functional.cross_entropy(x, _LABELS, reduction="sum") * 2 / torch.tensor(48.0)


def seen(loss: Loss, divisor: float, passes: int = 4) -> Accumulation | None:
    """Return what is known of a step of so many micro-batches."""
    scale = LossScale()
    for number in range(passes):
        root = loss(torch.randn(6, 3, requires_grad=True), number)
        root = root if divisor == 1 else root / divisor
        scale.note(terms(root, by_scaler=False), root, by_scaler=False)
    return scale.of(passes, "train.py:7", 2)


@pytest.mark.parametrize("loss", [mean, masked, of_all])
def test_a_step_that_is_one_mean_is_not_told(loss: Loss) -> None:
    """Whatever the mean is taken over; a sum that is divided by the number of all labels is one as it is."""
    known = seen(loss, 1 if loss is of_all else 4)
    assert known is None or (known.divided_by == 4 and known.counts == (4.0, 16.0))


@pytest.mark.parametrize("divisor", [1, 2, 16, 0.5])
@pytest.mark.parametrize("loss", [mean, masked])
def test_what_means_were_divided_by(loss: Loss, divisor: float) -> None:
    """By all numbers together, without what is the number of the micro-batch's own elements."""
    known = seen(loss, divisor)
    assert known is not None
    assert (known.micro_batches, known.divided_by, known.ranks, known.location) == (4, divisor, 2, "train.py:7")
    assert known.classes is (True if loss is mean else None)


@pytest.mark.parametrize(("loss", "divisor"), [(mean, 4), (masked, 4), (mean, 1), (mean, 16), (of_all, 1)])
def test_a_mean_whose_gradients_are_added_up_over_ranks(loss: Loss, divisor: float) -> None:
    """Only where each loss is one mean: a loss that is divided otherwise may allow for the sum."""
    scale = LossScale()
    for number in range(4):
        root = loss(torch.randn(6, 3, requires_grad=True), number) / divisor
        scale.note(terms(root, by_scaler=False), root, by_scaler=False)
    known = scale.of(4, "train.py:7", 1, Reduced(1.0, 8))
    expected = (8, 1.0) if (loss, divisor) == (mean, 4) else None
    assert known is None if expected is None else known is not None and (known.ranks, known.reduced_by) == expected


def test_how_many_labels_each_mean_is_taken_over() -> None:
    """Where labels are left out they count for different amounts."""
    known = seen(ignoring, 4)
    assert known is not None
    assert known.counts == (1.0, 4.0)


def test_a_loss_that_is_given_to_backward_twice() -> None:
    """By itself, and in a sum; two losses of one kind are two."""
    x = torch.randn(6, 3, requires_grad=True)
    loss, other = mean(x, 0), mean(2 * x, 0)
    scale = LossScale()
    for root in (loss, other):
        scale.note(terms(root, by_scaler=False), root, by_scaler=False)
    assert not scale.twice
    scale.note(terms(loss + other, by_scaler=False), loss + other, by_scaler=False)
    assert scale.twice


def test_losses_of_other_operations_are_of_other_kinds() -> None:
    """Whatever their values are; one without a graph is of none."""
    x = torch.randn(6, 3, requires_grad=True)
    kinds = [kind_of(loss(x * factor, 1)) for loss in (mean, masked) for factor in (1, 2)]
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3]
    assert kind_of(torch.ones(())) == 0
