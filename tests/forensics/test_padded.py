"""A model whose outputs depend on how much padding a batch has is reported where it is given a mask of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpdebug.detectors.rcp.rcp823_mask_hides_nothing import MaskHidesNothing
from ddpdebug.forensics.padded import look
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.forward_capture import ForwardCaptures

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
LENGTH = 10


class Notes(nn.Module):
    """Attention over words, and a score of the first of them, of all or of each."""

    def __init__(self, how: str, *, fixed: bool = False, pool: str = "first") -> None:
        super().__init__()
        self.words, self.places, self.last = (
            nn.Embedding(12, 8, padding_idx=0),
            nn.Embedding(LENGTH, 8),
            nn.Linear(8, 3),
        )
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)
        self.how, self.fixed, self.pool = how, fixed, pool

    def forward(self, text: Tensor, mask: Tensor) -> Tensor:
        length = LENGTH if self.fixed else text.shape[1]
        x = self.words(text) + self.places(torch.arange(length))
        hidden = {"right": ~mask.bool(), "inverted": mask.bool(), "left out": None}[self.how]
        x = x + self.layer(x, x, x, key_padding_mask=hidden)[0]
        shown = mask[..., None]
        pooled = {"first": x[:, 0], "each": x, "mean": x.mean(1), "masked": (x * shown).sum(1) / shown.sum(1)}
        return self.last(pooled[self.pool])


def effect(model: nn.Module, lengths: list[int], *, left: bool = False) -> float | None:
    """Return the change of outputs by less padding if the rule reports it."""
    places = torch.arange(LENGTH).flip(0) if left else torch.arange(LENGTH)
    mask = (places < torch.tensor(lengths)[:, None]).long()
    text = torch.randint(1, 12, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    captures = ForwardCaptures(GUARD)
    captures.begin(model, (text, mask), {}, 4)
    model(text, mask)
    fact = look(captures.current[-1])
    return None if fact is None or MaskHidesNothing().judge(fact) is None else fact.change


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("lengths", [[4, 7, 8, 5], [4, 10, 8, 5]])
@pytest.mark.parametrize("how", ["right", "inverted", "left out"])
def test_padding_that_is_attended_to(how: str, lengths: list[int], fixed: bool) -> None:
    """Also where the longest has none, and where a model takes one length only."""
    torch.manual_seed(2)
    for pool in ("first", "each", "masked"):
        assert (effect(Notes(how, fixed=fixed, pool=pool), lengths) is None) == (how == "right"), pool


def test_a_mean_over_padding() -> None:
    torch.manual_seed(2)
    assert effect(Notes("right", pool="mean"), [4, 7, 8, 5]) is not None


def test_where_nothing_can_be_said() -> None:
    """Padding on the left moves what it is taken from; without any there is nothing to compare."""
    torch.manual_seed(2)
    assert effect(Notes("left out"), [4, 7, 8, 5], left=True) is None
    assert effect(Notes("left out"), [LENGTH] * 4) is None


def test_a_model_that_is_given_no_mask() -> None:
    """Nothing says then that padding must not count."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.Embedding(12, 8), nn.Linear(8, 3)

        def forward(self, text: Tensor, *_: Any) -> Tensor:
            return self.last(self.words(text).mean(1))

    text = torch.randint(1, 12, (4, LENGTH))
    text[:, 7:] = 0
    captures = ForwardCaptures(GUARD)
    captures.begin(Mean(), (text,), {}, 4)
    assert look(captures.current[-1]) is None
