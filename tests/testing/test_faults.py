"""Faults happen where and when they are told to, and what looks for them finds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpdebug
from ddpdebug.testing import KINDS, Fault, assert_replicas_agree

_AT = 3


def train(rank: int, fault: Callable[..., Fault] | None, kind: str, *, steps: int = 6) -> tuple[nn.Module, list[bool]]:
    """Return the model and, for each step, whether the replicas agreed after it."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    injected = None if fault is None else fault(kind, model, optimizer, rank=1, step=_AT)
    generator = torch.Generator().manual_seed(rank)
    agreed = []
    for step in range(steps):
        x = torch.randn(6, 4, generator=generator)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            assert_replicas_agree(model)
            agreed.append(True)
        except AssertionError:
            agreed.append(False)
        assert injected is None or injected.happened == (rank == 1 and step >= _AT)
    return model, agreed


@pytest.mark.ranks(2)
def test_training_agrees_without_a_fault(rank: int) -> None:
    """The control."""
    assert train(rank, None, "")[1] == [True] * 6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["bit-flip", "skipped-all-reduce", "lr"])
def test_replicas_part_at_the_step_of_the_fault(rank: int, fault: Callable[..., Fault], kind: str) -> None:
    """And not before."""
    assert train(rank, fault, kind)[1] == [step < _AT for step in range(6)]


@pytest.mark.ranks(2)
def test_a_nan_reaches_all_ranks_at_the_step_of_the_fault(rank: int, fault: Callable[..., Fault]) -> None:
    """The reduction spreads it, so that the replicas still agree."""
    model, agreed = train(rank, fault, "nan", steps=_AT)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    model, agreed = train(rank, fault, "nan", steps=_AT + 1)
    assert all(agreed)
    assert not all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "kind, code",
    [("bit-flip", "RANK101"), ("skipped-all-reduce", "SYNC206"), ("lr", "RANK104"), ("same-data", "DATA901")],
)
def test_ddpdebug_finds_the_fault(
    rank: int, fault: Callable[..., Fault], kind: str, code: str, shared_tmp_path: Path
) -> None:
    """By the code that describes it, at the step where it happened."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpdebug.watch(model, optimizer, every_step=True, metrics="off", quiet=True, out=shared_tmp_path / "run") as m:
        fault(kind, model, optimizer, rank=1, step=_AT)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(8):
            model(torch.randn(6, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert code in {finding.code for finding in m.findings}, m.findings
    (found,) = (finding for finding in m.findings if finding.code == code)
    assert found.step in {_AT, _AT + 1}


def test_mistakes_are_told() -> None:
    """Before anything is installed."""
    with pytest.raises(ValueError, match=r"unknown kind of fault 'bit_flip'; did you mean bit-flip\?"):
        Fault("bit_flip", rank=0)
    with pytest.raises(ValueError, match="count from 0"):
        Fault("nan", rank=-1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="rank 1 cannot happen in a world of 1"):
        Fault("nan", rank=1).into(model, optimizer)
    with pytest.raises(ValueError, match=r"no parameter 'wight'; did you mean weight\?"):
        Fault("nan", rank=0, parameter="wight").into(model, optimizer)
    assert set(KINDS) == {"bit-flip", "skipped-all-reduce", "lr", "nan", "same-data"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_flipped_bit_changes_one_element_and_stays_finite(dtype: torch.dtype) -> None:
    """In every precision, in one process."""
    model = nn.Linear(3, 2).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fault = Fault("bit-flip", rank=0, parameter="bias").into(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    fault.remove()
    optimizer.step()
    assert torch.equal(before[0], model.weight)
    assert (before[1] != model.bias).tolist() == [True, False]
    assert bool(model.bias.isfinite().all())
