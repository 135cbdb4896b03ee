"""Dimensions that are taken for others in the graph of a loss."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from ddpdebug.probes.training_loop.dimensions import mixed_up
from ddpdebug.probes.training_loop.loss_graph import terms

torch.manual_seed(0)
CONV, HEAD, SCORES = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(8, 4), nn.Linear(8, 1)
IMAGES, TEXTS = torch.randn(2, 3, 8, 8), torch.randn(2, 6, 8)
QUERY, KEY, VALUE = (nn.Linear(8, 8) for _ in range(3))
SLOTS = nn.Linear(8, 5)


def classes(*shape: int, number: int = 4) -> torch.Tensor:
    return torch.randint(0, number, shape)


def attended(dim: int, *, drop: bool = False, divided: bool = False) -> torch.Tensor:
    """Attention of two heads, by hand."""
    q, k, v = (layer(TEXTS).view(2, 6, 2, 4).transpose(1, 2) for layer in (QUERY, KEY, VALUE))
    scores = (q @ k.transpose(-2, -1) / math.sqrt(4)).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9)
    weights = functional.dropout(scores.softmax(dim=dim), 0.1, training=drop)
    weights = weights / weights.sum(-1, keepdim=True) if divided else weights
    return (weights @ v).transpose(1, 2).reshape(2, 6, 8)


def einsum_attended(dim: int) -> torch.Tensor:
    q, k, v = (layer(TEXTS) for layer in (QUERY, KEY, VALUE))
    return torch.einsum("bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", q, k).softmax(dim), v)


def pooled_by_clusters() -> torch.Tensor:
    """A graph whose nodes are pooled into clusters: each node's shares add up to one."""
    shares = SLOTS(TEXTS).softmax(-1)
    return HEAD(shares.transpose(1, 2) @ TEXTS)


def of_torch() -> torch.Tensor:
    attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    found: torch.Tensor = attention(TEXTS, TEXTS, TEXTS)[0]
    return found


def mixed_heads() -> torch.Tensor:
    """DeepViT: the heads' weights are mixed, which sums over heads."""
    q, k, v = (layer(TEXTS).view(2, 6, 2, 4).transpose(1, 2) for layer in (QUERY, KEY, VALUE))
    weights = torch.einsum("bhij,hg->bgij", (q @ k.transpose(-2, -1)).softmax(-1), nn.Parameter(torch.rand(2, 2)))
    return weights @ v


def attended_both_ways() -> torch.Tensor:
    """QANet: attention of the attention."""
    one, other = QUERY(TEXTS), KEY(TEXTS[:, :5])
    scores = one @ other.transpose(1, 2)
    there, back = scores.softmax(2), scores.softmax(1)
    return torch.cat([there @ other, there @ back.transpose(1, 2) @ one], -1)


def pooled_graph() -> torch.Tensor:
    """DiffPool with a dense graph."""
    shares = torch.bmm(torch.rand(2, 6, 6), SLOTS(TEXTS)).softmax(-1)
    return shares.transpose(1, 2) @ QUERY(TEXTS)


def assigned() -> torch.Tensor:
    """NetVLAD: the words of a codebook, by einsum."""
    shares = torch.einsum("btd,de->bte", QUERY(TEXTS), nn.Parameter(torch.randn(8, 5))).softmax(-1)
    return torch.einsum("bte,btd->bed", shares, TEXTS)


def inverted() -> torch.Tensor:
    """Nystroemformer: a step towards the inverse of the weights."""
    weights = (QUERY(TEXTS) @ KEY(TEXTS).transpose(1, 2)).softmax(-1)
    start = weights.transpose(1, 2) * 0.25
    return 0.25 * start @ (13 * torch.eye(6) - weights @ start)


def pairs() -> torch.Tensor:
    return QUERY(TEXTS[0]) @ KEY(TEXTS[0]).t()


def both_ways(scores: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(6)
    return functional.nll_loss(scores.log_softmax(1), labels) + functional.nll_loss(scores.log_softmax(0), labels)


HEALTHY: dict[str, Callable[[], torch.Tensor]] = {
    "pixels": lambda: functional.cross_entropy(CONV(IMAGES), classes(2, 8, 8)),
    "pixels in rows": lambda: functional.cross_entropy(
        CONV(IMAGES).permute(0, 2, 3, 1).reshape(-1, 4), classes(2, 8, 8).flatten()
    ),
    "anchors": lambda: functional.cross_entropy(
        CONV(IMAGES).view(2, 2, 2, 8, 8).permute(0, 1, 3, 4, 2).reshape(-1, 2), classes(256, number=2)
    ),
    "words": lambda: functional.cross_entropy(HEAD(TEXTS)[:, :-1].reshape(-1, 4), classes(10)),
    "words by position": lambda: functional.cross_entropy(HEAD(TEXTS).transpose(1, 2), classes(2, 6)),
    "tied": lambda: functional.cross_entropy((TEXTS @ HEAD.weight.t()).view(-1, 4), classes(12)),
    "weights first": lambda: functional.cross_entropy((HEAD.weight @ TEXTS[0].t()).t(), classes(6)),
    "spans": lambda: functional.cross_entropy(SCORES(TEXTS).squeeze(-1), classes(2, number=6)),
    "choices": lambda: functional.cross_entropy(SCORES(TEXTS).view(3, 4), classes(3)),
    "contrast": lambda: functional.cross_entropy(QUERY(TEXTS[0]) @ KEY(TEXTS[0]).t(), torch.arange(6)),
    "logarithms": lambda: functional.nll_loss(functional.log_softmax(HEAD(TEXTS[0]), dim=1), classes(6)),
    "larger images": lambda: functional.cross_entropy(
        functional.interpolate(CONV(IMAGES), scale_factor=2, mode="bilinear"), classes(2, 16, 16)
    ),
    "attention": lambda: functional.cross_entropy(HEAD(attended(-1, drop=True)).view(-1, 4), classes(12)),
    "slots": lambda: attended(-2, divided=True).square().mean(),
    "torch": lambda: of_torch().square().mean(),
    "clusters": lambda: pooled_by_clusters().square().mean(),
    "sums": lambda: einsum_attended(2).square().mean(),
    "mixed heads": lambda: mixed_heads().square().mean(),
    "both ways": lambda: attended_both_ways().square().mean(),
    "graph": lambda: pooled_graph().square().mean(),
    "codebook": lambda: assigned().square().mean(),
    "inverse": lambda: inverted().square().mean(),
    "pairs both ways": lambda: both_ways(pairs()),
    "prototypes both ways": lambda: functional.cross_entropy(nn.Linear(8, 6)(TEXTS[0]).t(), torch.arange(6)),
    "two softmaxes": lambda: functional.nll_loss(pairs().log_softmax(0) + pairs().log_softmax(1), torch.arange(6)),
    "learned inputs": lambda: functional.cross_entropy(
        nn.Linear(8, 6).requires_grad_(False)(nn.Parameter(torch.randn(6, 8))), torch.arange(6)
    ),
}
FAULTS: dict[str, tuple[str, Callable[[], torch.Tensor]]] = {
    "pixels": ("view", lambda: functional.cross_entropy(CONV(IMAGES).view(-1, 4), classes(2, 8, 8).flatten())),
    "words": ("view", lambda: functional.cross_entropy(HEAD(TEXTS).view(2, 4, 6), classes(2, 6))),
    "samples": ("softmax", lambda: functional.nll_loss(functional.log_softmax(HEAD(TEXTS[0]), dim=0), classes(6))),
    "attention": ("attention", lambda: attended(-2, drop=True).square().mean()),
    "below a loss": ("attention", lambda: functional.cross_entropy(HEAD(attended(2)).view(-1, 4), classes(12))),
    "sums": ("attention", lambda: einsum_attended(1).square().mean()),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_dimensions_in_their_places(name: str) -> None:
    loss = HEALTHY[name]()
    assert mixed_up(terms(loss, by_scaler=False), loss) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_dimension_that_is_taken_for_another(name: str) -> None:
    kind, make = FAULTS[name]
    loss = make()
    assert [found.mixed for found in mixed_up(terms(loss, by_scaler=False), loss)] == [kind]
