"""The settings of a loss that ranks are to share, read from its graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from ddpdebug.detectors.rank.rank107_outputs_disagree import OutputsDisagree
from ddpdebug.probes.training_loop.loss_settings import Settings
from ddpdebug.schema.announcements import LOSS_FUNCTIONS, LossSettings

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


def _plain(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores, labels)


def _told(loss: Loss, looks: int = 16, *, at: list[int] | None = None) -> LossSettings:
    """Return what is told last of so many losses; add to `at` each look that something is told after."""
    settings, told = Settings(), None
    generator = torch.Generator().manual_seed(0)
    for look in range(1, looks + 1):
        size = 5 + look % 3
        scores = torch.randn(size, 3, generator=generator, requires_grad=True)
        labels = torch.randint(0, 3, (size,), generator=generator)
        found = settings.look(loss(scores, labels), "train.py:9", by_scaler=False)
        if found is not None:
            told = found
            if at is not None:
                at.append(look)
    assert told is not None
    assert told[0] == 0
    return told[1]


def _findings(loss: Loss) -> list[tuple[str, ...]]:
    told = {0: _told(_plain), 1: _told(loss), 2: _told(_plain)}
    findings = list(OutputsDisagree().compare("loss_settings:0", told))
    assert all(tuple(found.ranks) == (1,) and found.location == "train.py:9" for found in findings)
    return [tuple(found.subject) for found in findings]


_DIFFERENT: dict[str, tuple[Loss, str]] = {
    "sum": (lambda x, y: functional.cross_entropy(x, y, reduction="sum"), "NllLoss.reduction"),
    "ignored label": (lambda x, y: functional.cross_entropy(x, y, ignore_index=0), "NllLoss.ignore_index"),
    "smoothed labels": (lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1), LOSS_FUNCTIONS),
    "another term": (lambda x, y: _plain(x, y) + 0.1 * x.square().mean(), LOSS_FUNCTIONS),
}


@pytest.mark.parametrize("name", _DIFFERENT)
def test_a_setting_that_one_rank_has_otherwise(name: str) -> None:
    """The setting is named, and the rank."""
    loss, subject = _DIFFERENT[name]
    assert _findings(loss) == [(subject,)]


def test_ranks_with_different_class_weights() -> None:
    """They are compared by their values, however each rank came by them."""
    others = [_WEIGHTS, _WEIGHTS.clone(), _WEIGHTS.flip(0)]
    told = {
        rank: _told(lambda x, y, weight=weight: functional.cross_entropy(x, y, weight=weight.clone()))
        for rank, weight in enumerate(others)
    }
    [found] = OutputsDisagree().compare("loss_settings:0", told)
    assert (tuple(found.subject), tuple(found.ranks)) == (("NllLoss.weight",), (2,))


_SAME: dict[str, Loss] = {
    "another scale": lambda x, y: _plain(x, y) / len(y) * 2,
    "another task": lambda x, _: functional.smooth_l1_loss(x, torch.zeros_like(x), beta=0.3),
    "micro-batches": lambda x, y: torch.stack([_plain(x[:2], y[:2]), _plain(x[2:], y[2:])]).mean(),
    "weights of each batch": lambda x, y: functional.cross_entropy(x, y, weight=x.detach()[0].exp()),
    "a term of some steps": lambda x, y: _plain(x, y) + (x.square().mean() if len(x) % 2 else 0.0),
}


@pytest.mark.parametrize("name", _SAME)
def test_what_differs_by_itself(name: str) -> None:
    """What changes from step to step is no setting, and another task has a loss of its own."""
    assert _findings(_SAME[name]) == []


def test_a_setting_that_changes_later_is_told() -> None:
    """A window that it changes in says nothing of it; the next one has it."""
    calls, looks = [0], list[int]()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return functional.cross_entropy(x, y, reduction="sum" if calls[0] > 18 else "mean")

    assert "NllLoss.reduction" not in _told(loss, 20).settings
    calls[0] = 0
    assert _told(loss, 80, at=looks).settings["NllLoss.reduction"] == "2"
    assert looks == [16, 20, 24, 28, 32, 64]


@pytest.mark.parametrize(
    ("shares", "told"), [((0.25, 0.5), (0.75, 15)), ((0.25, None), (None, None)), ((), (None, None))]
)
def test_the_share_of_the_labels_is_that_of_a_whole_step(
    shares: tuple[float | None, ...], told: tuple[float | None, int | None]
) -> None:
    """Of the newest that has ended, and where each of its losses is a sum over labels."""
    settings, generator = Settings(), torch.Generator().manual_seed(0)
    settings.step_ends(15, [None if share is None else (lambda share=share: share) for share in shares])
    for _ in range(16):
        scores = torch.randn(5, 3, generator=generator, requires_grad=True)
        found = settings.look(_plain(scores, torch.zeros(5, dtype=torch.int64)), "train.py:9", by_scaler=False)
    assert found is not None
    assert (found[1].share, found[1].counted) == told
