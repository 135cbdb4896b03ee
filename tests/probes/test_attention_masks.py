"""Masks of zeros and ones that attention adds, as the graph of a forward shows them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ddpdebug.probes.training_loop.attention_masks import added_masks

_STANDS = torch.arange(6) < torch.tensor([[2], [6]])  # of two rows, where a token is


def _attended(mask: torch.Tensor | None) -> torch.Tensor:
    x = torch.randn(2, 1, 6, 8, requires_grad=True)
    return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum(-1).tanh()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mask_of_zeros_and_ones(dtype: torch.dtype) -> None:
    """Whatever stands between it and the output of the model."""
    x = torch.randn(2, 1, 6, 8, dtype=dtype, requires_grad=True)
    mask = _STANDS.to(dtype)[:, None, None]
    (found,) = added_masks([functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).square().mean()])
    assert found.shape[0] == 2
    assert found.zeros == pytest.approx(1 / 3)


def test_a_triangle() -> None:
    """The mask of a text, by which a token sees the ones before it."""
    assert len(list(added_masks([_attended(torch.ones(6, 6).tril())]))) == 1


@pytest.mark.parametrize(
    "mask",
    [
        None,
        _STANDS[:, None, None],
        torch.zeros(2, 1, 1, 6).masked_fill(~_STANDS[:, None, None], -torch.inf),
        torch.zeros(2, 1, 6, 6),
        torch.ones(2, 1, 6, 6),  # changes nothing
        torch.linspace(-1, 1, 36).reshape(6, 6),  # a bias
        (torch.arange(6)[:, None] + torch.arange(6)).remainder(3).eq(0).float(),  # the edges of a graph
    ],
)
def test_other_masks(mask: torch.Tensor | None) -> None:
    """Truth values, minus infinity, a bias, or none at all."""
    assert list(added_masks([_attended(mask)])) == []


def test_in_a_module_of_torch() -> None:
    """Of two layers one is told; without a gradient there is no graph to read."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 6, 8)
    assert len(list(added_masks([encoder(x, src_key_padding_mask=(~_STANDS).float())]))) == 1
    assert list(added_masks([encoder(x, src_key_padding_mask=~_STANDS)])) == []
    with torch.no_grad():
        assert list(added_masks([encoder(x, src_key_padding_mask=(~_STANDS).float())])) == []
