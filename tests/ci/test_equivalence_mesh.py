"""Ranks on a mesh against one process: healthy models pass, reported faults are found, with dimension and parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpdebug.ci.equivalence import judge, measure
from ddpdebug.ci.shard_places import Place, is_block_of, places_in
from ddpdebug.schema.finding import Finding, Severity

from .mesh_models import HEALTHY, WRONG, Made

#: One healthy model and one fault are enough of a proof for each change.
QUICK = {"experts", "norm_not_reduced"}


def each(*entries: Any) -> list[Any]:
    return [pytest.param(*e, marks=() if e[0].__name__ in QUICK else pytest.mark.slow) for e in entries]


def finding(build: Callable[..., Made], mesh: str) -> Finding | None:
    """Measure on this test's ranks, judge what all of them say."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in mesh.split(",") if part)}
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, measure(build, steps=2, mesh=sizes))
    found = judge(dict(enumerate(told)))
    return found[0] if found else None


@pytest.mark.ranks(4)
@pytest.mark.parametrize("build, mesh", each(*HEALTHY), ids=lambda value: getattr(value, "__name__", None))
def test_healthy_meshes_pass(build: Callable[..., Made], mesh: str) -> None:
    """FSDP2, HSDP, tensor, sequence, expert and context parallelism, a pipeline, an optimizer of whole matrices."""
    assert finding(build, mesh) is None


@pytest.mark.ranks(4)
@pytest.mark.parametrize("build, mesh, words", each(*WRONG), ids=lambda value: getattr(value, "__name__", None))
def test_faults_are_found_and_named(build: Callable[..., Made], mesh: str, words: str) -> None:
    """With the parameters, and the dimension where a number or a sum shows it."""
    found = finding(build, mesh)
    assert found is not None
    assert (found.code, found.severity, found.step) == ("SYNC209", Severity.ERROR, 0)
    assert words in f"{found.evidence['reading']} {found.evidence.get('output')}"


def test_plain_parts_are_found_by_their_values() -> None:
    """By name where that holds them, else anywhere; what is the same everywhere goes with its neighbours."""
    torch.manual_seed(0)
    w, u = torch.randn(4, 6), torch.randn(2, 6)
    whole = {"0.w": w, "0.b": torch.zeros(4), "1.w": w.flip(0), "1.b": torch.zeros(4), "u": u}
    stage = {"0.w": w.flip(0), "0.b": torch.zeros(4), "u": u[:, 3:]}
    assert places_in(whole, stage) == {
        "0.w": Place("1.w", (0, 0), (4, 6)),
        "0.b": Place("1.b", (0,), (4,)),
        "u": Place("u", (0, 3), (2, 3)),
    }
    drawn_anew = {"0.w": torch.randn(4, 6), "other": torch.randn(5)}
    assert places_in(whole, drawn_anew) == {"0.w": Place("0.w", (0, 0), (4, 6))}


def rows() -> Iterator[tuple[torch.Tensor, bool | None]]:
    whole = torch.arange(48.0).view(4, 6, 2)
    yield whole[2:, 3:], True
    yield whole[:2][:, [0, 5]], True  # the first and the last part of a sequence
    yield whole[2:, 3:] + 1, False
    yield torch.zeros(3, 6, 2), None


def test_outputs_are_looked_for_in_those_of_one_process() -> None:
    """A block, or rows in another order; a shape that is no part says nothing."""
    whole = torch.arange(48.0).view(4, 6, 2)
    for part, expected in rows():
        assert is_block_of(part, whole, 0.1) is expected
