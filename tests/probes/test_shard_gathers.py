"""What ranks gather is one and the same for all that gather from each other; what stays gathered is what they hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.probes.record import SinceLastStep, StepRecord
from ddpdebug.probes.shard_gathers import Gathered
from ddpdebug.schema.row import Flag

_OWN = nn.Parameter(torch.zeros(4))
_OTHER = nn.Parameter(torch.zeros(2))


def _columns(part: Gathered) -> dict[str, Any]:
    names, keys = ("w", "expert"), (id(_OWN), id(_OTHER))
    return part.columns(StepRecord(0, 0, Flag(0), SinceLastStep(), checked=True, names=names, ids=keys))


def _gathered(*values: float, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """Return the columns after gathers of one parameter, beside another one that fewer ranks share."""
    part = Gathered()
    for value in values:
        part.note(internals.Gathering([_OWN], [torch.full((8,), value)], [None], ranks))
        part.note(internals.Gathering([_OTHER], [torch.randn(2)], [None], (0,)))
    found = _columns(part)
    part.let_go()
    assert _columns(part) == found
    return found


def test_the_same_bytes_have_the_same_digest() -> None:
    """However often they were gathered; what fewer ranks share is left out."""
    assert _gathered(1.0) == _gathered(1.0, 1.0) == _gathered(1.0, 1.0, 1.0)
    assert _gathered(1.0)["gathered_key"] != 0


@pytest.mark.parametrize("values", [(2.0,), (1.0, 2.0), (2.0, 1.0)], ids=str)
def test_other_bytes_have_another_digest(values: tuple[float, ...]) -> None:
    """In the forward or in the backward."""
    found, usual = _gathered(*values), _gathered(1.0, 1.0)
    assert found["gathered_values"] != usual["gathered_values"]
    assert found["gathered_key"] == usual["gathered_key"]


def test_ranks_of_other_groups_have_another_key() -> None:
    """Their parameters are others."""
    assert _gathered(1.0)["gathered_key"] != _gathered(1.0, ranks=(2, 3))["gathered_key"]


@pytest.mark.parametrize("moved", [0.0, 1.0], ids=str)
def test_what_stays_gathered_is_held_against_the_own_part(moved: float) -> None:
    """An optimizer step that the gathered values have not seen is noted."""
    part = Gathered()
    part.keep([(_OWN, torch.zeros(4), torch.full((4,), moved)), (_OTHER, torch.ones(2), torch.ones(2))])
    assert Flag(_columns(part)["flags"]) == (Flag.KEPT_GATHERED if moved else Flag(0))


def test_gradients_that_replicas_have_not_added_up_wait() -> None:
    """Until a later backward reduces them for all."""
    part = Gathered()
    part.settle([_OWN, _OTHER], is_apart=True)
    assert Flag(_columns(part)["flags"]) == Flag.SHARDS_UNREDUCED
    part.settle([_OWN, _OTHER], is_apart=False)
    assert not _columns(part)["flags"]


@pytest.mark.parametrize("left", ["accumulated", "of the last backward", None], ids=str)
def test_gradients_that_stay_with_gathered_parameters_wait(left: str | None) -> None:
    """In the precision in which they were computed, or in that in which they are reduced."""
    whole = nn.Parameter(torch.zeros(4))
    whole.grad = torch.ones(4) if left == "of the last backward" else None
    accumulated = torch.ones(4) if left == "accumulated" else None
    holder = SimpleNamespace(unsharded_param=whole, unsharded_accumulated_grad=accumulated)
    assert internals.waits(holder) is (left is not None)
