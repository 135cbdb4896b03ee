"""The assertions about ranks, in ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpdebug.errors import UsageError
from ddpdebug.testing import assert_ranks_agree, assert_replicas_agree


def complaint(assertion: Callable[..., None], *args: Any, **options: Any) -> str:
    """Return what the assertion says, after making sure that it says the same on all ranks."""
    with pytest.raises(AssertionError) as error:
        assertion(*args, **options)
    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, str(error.value))
    assert len(set(told)) == 1
    return told[0]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
)
def test_the_minority_the_index_and_the_values_are_named(rank: int, dtype: torch.dtype) -> None:
    """For every kind of element, in one that lies far behind the first."""
    tensor = torch.zeros(40, 500, dtype=dtype)
    assert_ranks_agree(tensor, "table")
    if rank == 1:
        tensor[37, 499] = 1
    zero, one = (torch.tensor(value, dtype=dtype).item() for value in (0, 1))
    expected = "table differs between ranks: rank 1 against ranks 0,2; first at [37, 499]: "
    assert complaint(assert_ranks_agree, tensor, "table") == f"{expected}{zero} on ranks 0,2, {one} on rank 1"


@pytest.mark.ranks(2)
def test_two_ranks_have_no_majority(rank: int) -> None:
    """Nobody is blamed where nobody can know."""
    text = complaint(assert_ranks_agree, torch.tensor(float(rank)))
    words = "rank 0 against rank 1, no majority; first at []: 0.0 on rank 0, 1.0 on rank 1"
    assert text == f"tensor differs between ranks: {words}"


@pytest.mark.ranks(2)
def test_every_bit_counts_unless_a_tolerance_is_given(rank: int) -> None:
    """-0.0 is not 0.0; a tolerance forgives what is close, and NaN where all have it."""
    zero = torch.tensor([-0.0 if rank else 0.0])
    assert "-0.0 on rank 1" in complaint(assert_ranks_agree, zero)
    assert_ranks_agree(zero, atol=1e-9)
    near = torch.tensor([1.0, float("nan"), 1.0 + 1e-6 * rank])
    assert "first at [2]" in complaint(assert_ranks_agree, near)
    assert_ranks_agree(near, rtol=1e-5)
    far = torch.linspace(0, 1, 600_000) + torch.arange(600_000).eq(590_000) * rank
    assert "first at [590000]" in complaint(assert_ranks_agree, far, rtol=1e-3)


@pytest.mark.ranks(2)
def test_unusual_tensors(rank: int) -> None:
    """Empty, not contiguous, sparse, and with gradients."""
    assert_ranks_agree(torch.empty(0, 3))
    assert_ranks_agree(torch.arange(12.0).reshape(3, 4).t().requires_grad_())
    sparse = torch.eye(3).to_sparse()
    assert_ranks_agree(sparse)
    assert "first at [0, 0]" in complaint(assert_ranks_agree, sparse * (1 + rank))


@pytest.mark.ranks(2)
def test_shape_dtype_and_name_are_compared_first(rank: int) -> None:
    """Before anything that would not fit."""
    shape = complaint(assert_ranks_agree, torch.zeros(2 + rank), "x")
    assert shape.startswith("x has another shape or dtype: rank 0 against rank 1, no majority; float32[2] on rank 0")
    dtype = complaint(assert_ranks_agree, torch.zeros(2, dtype=torch.float64 if rank else torch.float32))
    assert "float64[2] on rank 1" in dtype
    names = complaint(assert_ranks_agree, torch.zeros(2), f"of {rank}")
    assert names == "the ranks compare different things: of 0 is not on rank 1, of 1 is not on rank 0"


@pytest.mark.ranks(3)
def test_a_rank_that_does_not_come_is_named(rank: int) -> None:
    """After the deadline, and the group can still be used."""
    if rank != 2:
        with pytest.raises(AssertionError, match=r"rank 2 did not come to assert_ranks_agree\('loss'\) within 0\.2 s"):
            assert_ranks_agree(torch.zeros(1), "loss", timeout=0.2)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3


def test_without_a_group_it_says_what_is_missing() -> None:
    """A usage error, in a process of its own."""
    with pytest.raises(UsageError, match="there is none: mark the test"):
        assert_ranks_agree(torch.zeros(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.ranks(3)
def test_replicas_are_compared_by_name(rank: int) -> None:
    """Parameters and buffers, inside DDP as well as outside; what is on the ignore list is left out."""
    torch.manual_seed(0)
    model = Model()
    assert_replicas_agree(model)
    assert_replicas_agree(DistributedDataParallel(model))
    with torch.no_grad():
        if rank == 2:
            model.last.weight[0, 1] = 5
            model.norm.running_mean[0] = 7
    text = complaint(assert_replicas_agree, model)
    assert re.fullmatch(
        r"last\.weight differs between ranks: rank 2 against ranks 0-1; first at \[0, 1\]: \S+ on ranks 0-1, 5\.0 on "
        r"rank 2; and so in 1 more tensor: norm\.running_mean",
        text,
    )
    assert complaint(assert_replicas_agree, model, atol=6).startswith("norm.running_mean differs")
    model._ddp_params_and_buffers_to_ignore = ["last.weight", "norm.running_mean"]
    assert_replicas_agree(model)


@pytest.mark.ranks(2)
def test_replicas_with_other_parts_are_different_things(rank: int) -> None:
    """Names first."""
    model = nn.Sequential(nn.Linear(2, 2), *([nn.Linear(2, 2)] if rank else []))
    text = complaint(assert_replicas_agree, model)
    assert text == "the ranks compare different things: 1.weight is not on rank 0, 1.bias is not on rank 0"
