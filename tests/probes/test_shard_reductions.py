"""What ranks put into FSDP2's reductions, and what they get, adds up to the same; a piece that is off is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.shard_reductions import ShardReductions, ShardSums
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import BackwardEnded, Bus
from ddpdebug.schema.row import CHECKSUM_SLOTS, Flag

_RANKS = 3
_SHAPE = (7, 5)
_ROWS = 3  # of the last rank only one


def _ranks(
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, piece: piece,
    *,
    micro: int = 1,
    left: float | None = None,
    cleared: bool = False,
    divisor: float = _RANKS,
    partial: bool = False,
    holders: int = 1,
) -> list[tuple[ShardSums, dict[str, Any]]]:
    """Reduce one parameter's gradients over ranks that are here one after the other; return what each has noted."""
    torch.manual_seed(0)
    grads = torch.randn(micro, _RANKS, *_SHAPE)
    noted = []
    for rank in range(_RANKS):
        guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
        state, bus = StepState(_RANKS), Bus(guard)
        probe, rows = ShardReductions(bus, state, guard), slice(rank * _ROWS, (rank + 1) * _ROWS)
        parameter = nn.Parameter(torch.zeros(_SHAPE)[rows])
        if left is not None:
            parameter.grad = torch.full_like(parameter, left)
        for one in range(micro):
            reduction = internals.Reduction(
                [parameter], [grads[one, rank]], [_ROWS], _RANKS, rank, _RANKS, divisor, False, False, []
            )
            reduction = reduction._replace(is_whole=not partial)
            monkeypatch.setattr(internals, "reduction_of", lambda *_, found=reduction: found)
            probe._reduces()
            piece = wrong(rank, grads[one].sum(0)[rows] / divisor)
            parameter.grad = piece if parameter.grad is None else parameter.grad + piece
            bus.emit(BackwardEnded())
            if cleared:
                parameter.grad = None
        sharding: Any = SimpleNamespace(holders=(holders,))
        record = StepRecord(
            0, 0, Flag(0), state.since, checked=True, names=("w",), ids=(id(parameter),), sharding=sharding
        )
        record.slots = {id(parameter): 2}
        part = state.since.parts[ShardSums]
        noted.append((part, part.columns(record)))
        part.let_go()
        assert part.columns(record) == noted[-1][1]
    return noted


def _sums(noted: list[tuple[ShardSums, dict[str, Any]]], slot: int = 2) -> tuple[float, float]:
    return tuple(math.fsum(found[f"{name}_sum_{slot}"] for _, found in noted) for name in ("local", "reduced"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"micro": 3},
        {"left": 0.0},
        {"left": 2.0, "micro": 2},
        {"micro": 2, "cleared": True},
        {"divisor": 1.0},
        {"holders": 2},
    ],
    ids=str,
)
def test_what_all_put_in_is_what_all_get(monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]) -> None:
    """Over micro-batches, beside gradients of before or cleared in between, divided as told, on replicas over tp."""
    noted = _ranks(monkeypatch, **how)
    local, reduced = _sums(noted)
    assert reduced == pytest.approx(local, rel=1e-4)
    assert all(found[f"local_norm_{slot}"] == 0 for _, found in noted for slot in range(CHECKSUM_SLOTS) if slot != 2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rank, piece: piece * (rank != 1),
        lambda _, piece: piece * _RANKS,
        lambda rank, piece: piece.flip(0) if rank else piece + 0.3,
    ],
    ids=["lost", "not divided", "another"],
)
def test_a_piece_that_is_off_changes_the_sum(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    """Whatever has happened to it."""
    local, reduced = _sums(_ranks(monkeypatch, wrong))
    assert abs(reduced - local) > 0.05


def test_pieces_that_get_to_the_wrong_ranks_change_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece has a weight of its own: plain sums over all ranks would be the same."""
    total = torch.zeros(_RANKS)

    def keep(rank: int, piece: torch.Tensor) -> torch.Tensor:
        total[rank] = piece.sum()
        return piece

    _ranks(monkeypatch, keep)
    swapped = {0: 1, 1: 0, 2: 2}
    local, reduced = _sums(
        _ranks(monkeypatch, lambda rank, piece: torch.full_like(piece, total[swapped[rank]] / piece.numel()))
    )
    assert abs(reduced - local) > 0.05


def test_what_is_not_followed_has_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction over some of the ranks only says nothing about the others."""
    for _, found in _ranks(monkeypatch, partial=True):
        assert "local_sum_2" not in found
