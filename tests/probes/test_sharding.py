"""Which ranks share which parts of parameters: from DTensors on meshes of a job that is only imagined."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpdebug
from ddpdebug import torch_internals as internals
from ddpdebug.probes.sharding import Sharding, sharding_of

_WORLD = 4


@pytest.fixture(autouse=True)
def no_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, "torch.distributed.pipelining", raising=False)  # another test may have loaded it
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _as_rank(rank: int) -> None:
    """Be a rank of a job whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=_WORLD, store=FakeStore())


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _placed(mesh: Any, *placements: Any) -> torch.Tensor:
    """Return a DTensor; as a parameter it would have the mesh that an operation has seen first, of another rank."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(torch.ones(4, 2), mesh, placements, run_check=False)


def _watch(**parameters: torch.Tensor) -> tuple[list[str], list[torch.Tensor], list[bool]]:
    names = sorted(parameters)
    return names, [parameters[name] for name in names], [False] * len(names)


def _of(rank: int, kind: str) -> Sharding:
    from torch.distributed.tensor import Replicate, Shard

    _as_rank(rank)
    if kind == "fsdp":
        watch = _watch(w=_placed(_mesh((4,), ("dp",)), Shard(0)))
    elif kind == "hsdp":
        watch = _watch(w=_placed(_mesh((2, 2), ("replicate", "shard")), Replicate(), Shard(0)))
    else:
        mesh = _mesh((2, 2), ("dp", "tp"))
        watch = _watch(
            norm=_placed(mesh["dp"], Shard(0)), plain=nn.Parameter(torch.ones(3)), w=_placed(mesh, Shard(0), Shard(1))
        )
    found = sharding_of(*watch, _WORLD)
    assert found is not None
    return found


def _who_shares(kind: str, name: str) -> set[tuple[int, ...]]:
    """Return the ranks whose keys of a parameter's class are equal."""
    found: dict[int, list[int]] = {}
    for rank in range(_WORLD):
        sharding = _of(rank, kind)
        position = [n.partition(" [")[0] for n in sharding.names].index(name)
        slot = sharding.slots[position]
        if slot is not None:
            found.setdefault(sharding.keys[slot], []).append(rank)
    return {tuple(ranks) for ranks in found.values()}


@pytest.mark.parametrize(
    ("kind", "name", "ranks"),
    [
        ("fsdp", "w", set()),
        ("hsdp", "w", {(0, 2), (1, 3)}),
        ("fsdp over tp", "w", set()),
        ("fsdp over tp", "norm", {(0, 1), (2, 3)}),
        ("fsdp over tp", "plain", {(0, 1, 2, 3)}),
    ],
)
def test_who_shares_what(kind: str, name: str, ranks: set[tuple[int, ...]]) -> None:
    """Ranks share a part where they stand alike on all dimensions that part it, of its own mesh."""
    assert _who_shares(kind, name) == ranks


def test_the_names_say_the_part() -> None:
    """Names of parts are of the ranks that hold them, those of whole parameters of all."""
    assert _of(3, "hsdp").names == ("w [shard 1 of 2]",)
    assert _of(3, "fsdp over tp").names == ("norm [dp 1 of 2]", "plain", "w")
    assert _of(3, "fsdp").text.startswith("parameters are sharded over dp: nothing is replicated")


def test_shared_parts_are_read_where_they_are() -> None:
    """What is read of a shared part is its own memory; a part that nobody else has stays as it is."""
    from torch.distributed.tensor import Replicate, Shard

    _as_rank(0)
    mesh = _mesh((2, 2), ("replicate", "shard"))
    shared, alone = _placed(mesh, Replicate(), Shard(0)), _placed(mesh, Shard(0), Shard(1))
    watch = _watch(a=shared, b=alone)
    sharding = sharding_of(*watch, _WORLD)
    assert sharding is not None
    part, other = sharding.readable(watch[1])
    assert part.data_ptr() == internals.own_part(shared).data_ptr()
    assert part.grad_fn is None
    assert other is alone


def test_stages_share_what_their_mesh_replicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipeline other ranks hold other layers under the same names: only a mesh says who has the same."""
    from torch.distributed.tensor import Replicate

    monkeypatch.setitem(__import__("sys").modules, "torch.distributed.pipelining", SimpleNamespace())
    assert _who_shares("hsdp", "w") == {(0, 2), (1, 3)}
    assert _of(2, "hsdp").names == ("w [shard 0 of 2, ranks 0 2]",)
    assert _who_shares("fsdp over tp", "plain") == set()
    keys = {}
    for rank in range(_WORLD):  # two stages of two replicas
        _as_rank(rank)
        sharding = sharding_of(*_watch(w=_placed(_mesh((2, 2), ("pp", "dp"))["dp"], Replicate())), _WORLD)
        assert sharding is not None
        keys[rank] = sharding.keys
    assert keys[0] == keys[1] != keys[2] == keys[3]


def test_experts_of_a_rank_are_its_own() -> None:
    """Plain parameters of local experts are not compared, those of shared ones and of routers are."""
    from torch.distributed.tensor import Shard

    _as_rank(0)
    marked = nn.Parameter(torch.ones(2))
    marked.allreduce = False  # type: ignore[attr-defined]
    names = ["a", "block.experts.0.w", "block.router", "block.shared_experts.w", "local_expert.w", "moe.marked"]
    plain = [nn.Parameter(torch.ones(2)) for _ in names[1:-1]]
    parameters = [_placed(_mesh((4,), ("dp",)), Shard(0)), *plain, marked]
    sharding = sharding_of(names, parameters, [False] * len(names), _WORLD)
    assert sharding is not None
    compared = {name for name, slot in zip(names, sharding.slots, strict=True) if slot is not None}
    assert compared == {"block.router", "block.shared_experts.w"}
    assert sharding.text == (
        "parameters are sharded over dp: 2 are compared between the ranks that hold the same part, 1 has no replica, "
        "3 are of single ranks (experts, stages)"
    )


def test_without_dtensors() -> None:
    """A job without DTensors has no classes, and nothing of ours imports their package."""
    assert sharding_of(*_watch(w=nn.Parameter(torch.ones(2))), _WORLD) is None
    sources = Path(ddpdebug.__file__).parent.rglob("*.py")
    imports = re.compile(r"^\s*(from|import) torch\.distributed\.(_?tensor|fsdp|device_mesh)\b", re.MULTILINE)
    assert [path.name for path in sources if imports.search(path.read_text("utf-8"))] == []


def test_shares_of_a_norm_add_up() -> None:
    """Each rank's share is its part by the number of ranks that hold the same; one unknown norm leaves none."""
    sharding = _of(0, "fsdp over tp")
    assert sharding.holders == (2, 4, 1)
    found = sharding.norms({0: 3.0, 1: 2.0, 2: 4.0}, [0, 1, 2])
    assert found["part_norm"] == pytest.approx(29**0.5)
    assert found["share_norm"] == pytest.approx((9 / 2 + 4 / 4 + 16) ** 0.5)
    assert sharding.norms({0: 3.0}, [0, 1]) == {}


def _drawn(rank: int, values: torch.Tensor, *, first: bool = True, name: str = "w") -> dict[str, str]:
    from torch.distributed.tensor import DTensor, Shard

    _as_rank(rank)
    part = DTensor.from_local(values, _mesh((4,), ("dp",)), (Shard(0),), run_check=False)
    found = sharding_of(*_watch(**{name: part}), _WORLD, first=first)
    assert found is not None
    return dict(found.place.drawn)


def test_parts_that_begin_alike_have_one_mark() -> None:
    one, other = (_drawn(rank, torch.arange(12.0).view(4, 3)) for rank in (0, 3))
    assert [*one] == ["w [dp 0 of 4]"]
    assert [*other] == ["w [dp 3 of 4]"]
    assert [*one.values()] == [*other.values()]
    assert [*_drawn(1, torch.arange(12.0).view(4, 3) + 1).values()] != [*one.values()]


@pytest.mark.parametrize("values", [torch.ones(4, 3), torch.ones(4), torch.ones(0, 3), torch.ones(1, 3)])
def test_what_was_not_drawn_has_none(values: torch.Tensor) -> None:
    assert _drawn(0, values) == {}


def test_experts_may_be_copies_and_trained_parts_are_not_read() -> None:
    values = torch.arange(12.0).view(4, 3)
    assert _drawn(0, values, name="experts.w") == {}
    assert _drawn(0, values, first=False) == {}
