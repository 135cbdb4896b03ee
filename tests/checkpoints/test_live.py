"""`digests_of` and `compare_states` with the tensors of a running program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ddpdebug
from ddpdebug.checkpoints.comparison import compare
from ddpdebug.checkpoints.files import open_state


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3))


def test_digests_have_names_and_see_values_alone() -> None:
    """A copy has the same; strides do not matter; one element does."""
    model, copy = make(), make()
    assert ddpdebug.digests_of(model.named_parameters()) == ddpdebug.digests_of(copy.state_dict())
    with torch.no_grad():
        copy[0].weight[3, 2] += 1
    ours, theirs = (ddpdebug.digests_of(each.named_parameters()) for each in (model, copy))
    assert [name for name in ours if ours[name] != theirs[name]] == ["0.weight"]
    assert all(0 <= digest < 1 << 64 for digest in ours.values())
    turned = {"w": model[0].weight.t().contiguous().t()}
    assert ddpdebug.digests_of(turned)["w"] == ours["0.weight"]


@pytest.mark.parametrize(
    "named, message",
    [
        ([("w", torch.ones(2)), ("w", torch.ones(2))], "two tensors are called 'w'"),
        ({"w": 3}, "'w' is no tensor but int"),
        ({"w": torch.ones(2, device="meta")}, "'w' has no digest: the tensor has no data"),
    ],
)
def test_what_has_no_digest(named: object, message: str) -> None:
    """It is an error that names it."""
    with pytest.raises(ddpdebug.UsageError, match=message):
        ddpdebug.digests_of(named)  # type: ignore[arg-type]


def test_live_states_are_compared_with_each_other_and_with_a_file(tmp_path: Path) -> None:
    """Pairs, mappings and paths."""
    model = make()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    assert ddpdebug.compare_states(model.named_parameters(), str(tmp_path / "a.pt")).equal
    with torch.no_grad():
        model[2].bias[1] = float("nan")
    found = ddpdebug.compare_states(tmp_path / "a.pt", model.state_dict())
    assert not found.equal
    (one,) = found.differences
    assert (one.name, one.index, one.differing, one.elements, one.nonfinite) == ("2.bias", (1,), 1, 3, 1)
    assert "2.bias" in str(found)
    with pytest.raises(ddpdebug.UsageError, match="nothing to compare"):
        ddpdebug.compare_states({}, [])


@pytest.mark.ranks(4)
def test_checkpoints_of_four_ranks_and_of_two_are_equal(rank: int, shared_tmp_path: Path) -> None:
    """FSDP2, saved with its optimizer; and live shards have the digests of the whole."""
    plain = ddpdebug.digests_of(make().named_parameters())
    meshes = {4: init_device_mesh("cpu", (4,)), 2: DeviceMesh("cpu", [0, 1])}
    for world, mesh in meshes.items():
        if rank >= world:
            continue
        model = make()
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        assert ddpdebug.digests_of(model.named_parameters()) == plain
        assert ddpdebug.compare_states(model.named_parameters(), make().named_parameters()).equal
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        weights, state = get_state_dict(model, optimizer)
        group = mesh.get_group()
        dcp.save(
            {"model": weights, "optimizer": state, "step": 7},
            checkpoint_id=shared_tmp_path / str(world),
            process_group=group,
        )
        if world == 2:
            local = model[2].weight.to_local()  # type: ignore[union-attr]
            with torch.no_grad():
                if rank == 1:
                    local[-1, 4] = 99.0
            dcp.save(
                {"model": weights, "optimizer": state, "step": 8},
                checkpoint_id=shared_tmp_path / "edited",
                process_group=group,
            )
    dist.barrier()
    if rank == 0:
        four, two, edited = (open_state(shared_tmp_path / name) for name in ("4", "2", "edited"))
        assert four.kind == "torch.distributed.checkpoint"
        assert len(four.entries["model.0.weight"].pieces) == 4  # type: ignore[union-attr]
        found = compare(four, two)
        assert found.equal, found
        assert found.compared == 3 * (60 + 10 + 10 + 10 + 30 + 3) + 6  # with the moments and a step for each parameter
        element, step = compare(four, edited).differences
        assert (element.name, element.index, element.differing) == ("model.2.weight", (2, 4), 1)
        assert element.values == (pytest.approx(make()[2].weight[2, 4].item(), abs=0.1), 99.0)
        assert (step.name, step.a, step.b) == ("step", "7", "8")


@pytest.mark.ranks(4)
def test_digests_over_meshes_of_two_dimensions(rank: int) -> None:
    """Sharded twice, sharded and replicated, replicated only: all ranks have the digest of the whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(7 * 5.0).reshape(7, 5)
    placements = {
        "rows and columns": (Shard(0), Shard(1)),
        "columns": (Shard(1), Replicate()),
        "rows twice": (Shard(0), Shard(0)),
        "copies": (Replicate(), Replicate()),
        "replicas of rows": (Replicate(), Shard(0)),
    }
    tensors = {name: distribute_tensor(whole, mesh, places) for name, places in placements.items()}
    digests = ddpdebug.digests_of({**tensors, "plain": whole})
    assert set(digests.values()) == set(ddpdebug.digests_of({"w": whole}).values())
    assert [*digests] != []
    partial = DTensor.from_local(whole, mesh, (Partial(), Replicate()), run_check=False)
    with pytest.raises(ddpdebug.UsageError, match="'w' has no digest: it holds partial sums"):
        ddpdebug.digests_of({"w": partial})
