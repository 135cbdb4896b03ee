"""Models on meshes, right and wrong ones, as factories of `ddpdebug equivalence`; each fault has been reported.

What is wrong is wrong on all ranks alike, but for the first ones, so that the ranks' agreement shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812 - the usual name

Made = tuple[Any, ...]


class _Gather(torch.autograd.Function):
    """All parts along a dimension; backward adds up what the ranks want of this one's, unless all want the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dim: int, add: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.add = group, dim, add
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0].contiguous()
        if ctx.add:
            dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None, None


class _Sum(torch.autograd.Function):
    """The sum over the ranks, whose gradient all of them have."""

    @staticmethod
    def forward(_: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Scatter(torch.autograd.Function):
    """This rank's part of the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, x = group, x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(group.size())[group.rank()]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gathered(grads[0], ctx.group, 0), None


def gathered(x: Tensor, group: Any, dim: int, *, add: bool = True) -> Any:
    return cast("Any", _Gather).apply(x, group, dim, add)


def summed(x: Tensor, group: Any) -> Any:
    return cast("Any", _Sum).apply(x, group)


def scattered(x: Tensor, group: Any) -> Any:
    return cast("Any", _Scatter).apply(x, group)


def own(x: Tensor, mesh: DeviceMesh, dim: int = 0) -> Tensor:
    """Return this rank's part over a mesh of one dimension."""
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()]


def squares(model: nn.Module, batch: Any) -> Any:
    return model(batch).square().mean()


# --- FSDP2, HSDP ------------------------------------------------------------------------------------------------------


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 4))


def sharded() -> Made:
    """FSDP2 over all ranks, by a factory without a mesh; the rows do not divide evenly."""
    model = layers()
    fully_shard(model[0])
    fully_shard(model)
    return model, squares, torch.randn(8, 6)


def hybrid(mesh: DeviceMesh, *, fault: str = "") -> Made:
    """HSDP."""
    if fault == "seed":
        torch.manual_seed(dist.get_rank())
    model = layers()
    inner = mesh["shard"] if fault == "not reduced" else mesh
    fully_shard(model[0], mesh=inner)
    fully_shard(model, mesh=inner)
    if fault == "divided":
        model[0].set_gradient_divide_factor(1.0)
    torch.manual_seed(1)
    batch = own(torch.randn(8, 6), mesh._flatten("all"))
    return model, squares, batch


def hybrid_seeded_by_rank(mesh: DeviceMesh) -> Made:
    """Row 1: nothing is broadcast."""
    return hybrid(mesh, fault="seed")


def hybrid_not_reduced(mesh: DeviceMesh) -> Made:
    """Row 25: the mesh lacks the dimension of the replicas."""
    return hybrid(mesh, fault="not reduced")


def hybrid_divided(mesh: DeviceMesh) -> Made:
    """Row 10: the gradients of one layer are added up and not divided."""
    return hybrid(mesh, fault="divided")


class Muon(torch.optim.Optimizer):
    """Orthogonal updates of matrices."""

    def __init__(self, params: Any, *, whole: bool) -> None:
        super().__init__(params, {"lr": 0.01})
        self._whole = whole

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local()
                if parameter.dim() != 2:
                    local -= group["lr"] * parameter.grad.to_local()
                    continue
                matrix = parameter.grad.full_tensor() if self._whole else parameter.grad.to_local()
                u, _, v = torch.linalg.svd(matrix, full_matrices=False)
                found = u @ v
                local -= group["lr"] * (own(found, parameter.device_mesh) if self._whole else found)


def muon(mesh: DeviceMesh, *, whole: bool = True) -> Made:
    """An optimizer that puts matrices together."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1)
    return model, squares, own(torch.randn(8, 6), mesh), Muon(model.parameters(), whole=whole)


def muon_of_shards(mesh: DeviceMesh) -> Made:
    """Row 31: it makes each rank's rows orthogonal."""
    return muon(mesh, whole=False)


# --- tensor and sequence parallelism ----------------------------------------------------------------------------------


class Feed(nn.Module):
    """A feed-forward block between norms."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(self.before(x))))


class Sequence(nn.Module):
    """A block that sees a part of the sequence, and a head that sees all of it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.feed, self.head, self.mesh = Feed(), nn.Linear(8, 3), mesh

    def forward(self, x: Tensor) -> Any:
        return self.head(gathered(self.feed(own(x, self.mesh, 1)), self.mesh.get_group(), 1, add=False)) * 1


def tensor_parallel(mesh: DeviceMesh) -> Made:
    """FSDP2 over sequence parallel norms and tensor parallel layers."""
    model = Sequence(mesh["tp"])
    plan = {
        "feed.before": SequenceParallel(),
        "feed.up": ColwiseParallel(input_layouts=Shard(1)),
        "feed.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(1)
    return model, squares, own(torch.randn(4, 6, 8), mesh["dp"])


class HandMade(nn.Module):
    """Tensor parallelism by hand, as Megatron's: plain parameters, of which some are a rank's columns or rows."""

    def __init__(self, mesh: DeviceMesh, fault: str) -> None:
        super().__init__()
        self.group, self.fault = mesh.get_group("tp"), fault
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 3)
        nn.init.normal_(self.down.bias)
        self.up.weight = nn.Parameter(own(self.up.weight, mesh["tp"]).detach().clone())
        self.down.weight = nn.Parameter(own(self.down.weight, mesh["tp"], 1).detach().clone())
        self.place = mesh["tp"]

    def forward(self, x: Tensor) -> Any:
        # the norm sees this rank's part of the sequence, the layers all of it
        x = gathered(self.norm(own(x, self.place, 1)), self.group, 1)
        if self.fault == "gathered":
            x = x.roll(1, 1)
        hidden = torch.tanh(self.up(x))
        if self.fault == "bias":
            out = summed(self.down(hidden), self.group)
        else:
            out = summed(hidden @ self.down.weight.T, self.group) + self.down.bias
        return self.head(out)


def by_hand(mesh: DeviceMesh, *, fault: str = "") -> Made:
    """Sequence parallel norms, whose gradients are added up by hand."""
    model = HandMade(mesh, fault)
    torch.manual_seed(1)
    batch = own(torch.randn(4, 8, 8), mesh["dp"])

    def step(model: HandMade, batch: Tensor) -> None:
        weighted = model(batch) * torch.arange(batch.shape[1])[:, None]  # so that the order counts
        (weighted.square().mean() / (mesh["dp"].size() if fault != "divided" else 1)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
            if name.startswith("norm") and fault != "norm":
                dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))

    return model, step, batch


def norm_not_reduced(mesh: DeviceMesh) -> Made:
    """Row 5 and its kin: each rank keeps the norm's gradient of its own part of the sequence."""
    return by_hand(mesh, fault="norm")


def bias_on_each_rank(mesh: DeviceMesh) -> Made:
    """Row 7: the bias is added before the sum over tp."""
    return by_hand(mesh, fault="bias")


def never_divided(mesh: DeviceMesh) -> Made:
    """The gradients are added up over dp."""
    return by_hand(mesh, fault="divided")


def rolled(mesh: DeviceMesh) -> Made:
    """Row 19: what is gathered is in another order."""
    return by_hand(mesh, fault="gathered" if mesh.size() > 1 else "")


# --- experts ----------------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Four experts, spread over ep; each rank has tokens of its own."""

    def __init__(self, mesh: DeviceMesh, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.group = mesh.get_group("ep")
        self.router = nn.Linear(6, 4, bias=False)
        experts = [nn.Linear(6, 6) for _ in range(4)]
        for expert in experts:
            nn.init.zeros_(expert.bias)
        n = 4 // mesh["ep"].size()
        self.first = n * mesh["ep"].get_local_rank()
        self.experts = nn.ModuleList(experts[self.first : self.first + n])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        gates = self.router(x).softmax(-1)
        if self.fault == "cut":
            gates = gates.detach()
        tokens, gates = gathered(x, self.group, 0), gathered(gates, self.group, 0, add=self.fault != "partial")
        mixed = sum(gates[:, self.first + i, None] * expert(tokens).relu() for i, expert in enumerate(self.experts))
        return self.head(x + scattered(mixed, self.group))


def experts(mesh: DeviceMesh, *, fault: str = "") -> Made:
    """Expert parallelism by hand: the experts' gradients come from all tokens already."""
    model = Mixture(mesh, fault if mesh.size() > 1 else "")
    torch.manual_seed(1)
    batch = own(own(torch.randn(16, 6), mesh["dp"]), mesh["ep"])

    def step(model: Mixture, batch: Tensor) -> None:
        squares(model, batch).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            if name.startswith("experts"):
                dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
                parameter.grad /= mesh["dp"].size() if fault == "scaled" else mesh.size()
            else:
                dist.all_reduce(parameter.grad)
                parameter.grad /= mesh.size()

    return model, step, batch


def experts_scaled(mesh: DeviceMesh) -> Made:
    """Row 9: they are divided by the ranks that hold them, and not by those that their tokens come from."""
    return experts(mesh, fault="scaled")


def experts_partial(mesh: DeviceMesh) -> Made:
    """Row 12: a rank's scores learn from the experts of this rank only."""
    return experts(mesh, fault="partial")


def experts_cut(mesh: DeviceMesh) -> Made:
    """Row 14: what gathers the scores is not differentiable."""
    return experts(mesh, fault="cut")


# --- context parallelism ----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention with rotary positions over a sequence that is split over cp."""

    def __init__(self, mesh: DeviceMesh, fault: str) -> None:
        super().__init__()
        self.mesh, self.fault = mesh["cp"], fault
        self.embed = nn.Embedding(11, 8)
        self.rotary = Rotary()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        n = tokens.shape[1]
        first = n * self.mesh.get_local_rank()
        at = torch.arange(n) + (0 if self.fault == "positions" else first)
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.rotary(q, at), self.rotary(k, at)
        k, v = (gathered(part, self.mesh.get_group(), 1) for part in (k, v))
        mask = (torch.arange(n) + first)[:, None] >= torch.arange(k.shape[1])
        return self.head(x + F.scaled_dot_product_attention(q, k, v, mask))


class Rotary(nn.Module):
    """Rotary positions."""

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        angle = at[:, None] / 10 ** torch.arange(x.shape[-1] // 2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def context(mesh: DeviceMesh, *, fault: str = "") -> Made:
    """A language model; its loss counts the tokens of all ranks."""
    model = Attention(mesh, fault)
    torch.manual_seed(1)
    tokens = torch.randint(1, 11, (4, 8))
    tokens[:, 5:] = 0  # padding, of which the second half of the sequence has more
    tokens = own(own(tokens, mesh["dp"]), mesh["cp"], 1)

    def step(model: nn.Module, tokens: Tensor) -> None:
        count = (tokens != 0).sum()
        if fault != "local tokens":
            dist.all_reduce(count)
        total = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=0, reduction="sum")
        (total / count).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            if fault == "local tokens":
                parameter.grad /= mesh.size()
            if fault == "scaled":
                parameter.grad *= mesh["cp"].size()

    return model, step, tokens


def context_scaled(mesh: DeviceMesh) -> Made:
    """Row 16: cp is counted twice."""
    return context(mesh, fault="scaled")


def context_positions(mesh: DeviceMesh) -> Made:
    """Each rank counts positions from 0."""
    return context(mesh, fault="positions")


def context_local_tokens(mesh: DeviceMesh) -> Made:
    """The loss is a mean over each rank's tokens."""
    return context(mesh, fault="local tokens")


# --- pipelines --------------------------------------------------------------------------------------------------------


def pipeline(mesh: DeviceMesh, *, fault: str = "") -> Made:
    """Two stages and GPipe's schedule; the second stage numbers its layers anew."""
    if mesh.size() == 1 and fault:
        return pipeline(mesh)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    n, rank, stages = 4 // mesh.size(), mesh.get_local_rank(), mesh.size()
    model = nn.Sequential(*blocks[n * rank : n * (rank + 1)])
    torch.manual_seed(1)
    batch = torch.randn(8, 6)
    scale = 1 if fault == "sum" else 4
    schedule = ScheduleGPipe(
        PipelineStage(model, rank, stages, torch.device("cpu"), group=mesh.get_group()),
        n_microbatches=4,
        loss_fn=lambda out, _: out.square().mean() / scale,
        scale_grads=False,
    )

    def step(_: nn.Module, batch: Tensor) -> None:
        schedule.step(*([batch] if rank == 0 else []), target=batch if rank == stages - 1 else None)

    return model, step, batch


def pipeline_sum(mesh: DeviceMesh) -> Made:
    """Row 21: the gradients of the micro-batches are added up."""
    return pipeline(mesh, fault="sum")


HEALTHY: list[tuple[Callable[..., Made], str]] = [
    (sharded, ""),
    (hybrid, "replicate=2,shard=2"),
    (muon, "dp=4"),
    (tensor_parallel, "dp=2,tp=2"),
    (by_hand, "dp=2,tp=2"),
    (experts, "dp=2,ep=2"),
    (context, "dp=2,cp=2"),
    (pipeline, "pp=4"),
]

#: Factory, mesh, and what the finding must say.
WRONG: list[tuple[Callable[..., Made], str, str]] = [
    (hybrid_seeded_by_rank, "replicate=2,shard=2", "differ before the first step"),
    (hybrid_not_reduced, "replicate=2,shard=2", "differ over replicate, and their mean is that of one process"),
    (
        hybrid_divided,
        "replicate=2,shard=2",
        "gradients of `0.weight` and `0.bias` are 4 x: the size of replicate x shard",
    ),
    (muon_of_shards, "dp=4", "updates of `0.weight` and `2.weight` have no common ratio"),
    (norm_not_reduced, "dp=2,tp=2", "gradients of `norm.weight` and `norm.bias` differ over tp, and their sum is that"),
    (bias_on_each_rank, "dp=1,tp=4", "`down`"),
    (never_divided, "dp=4,tp=1", "gradients of all parameters are 4 x: the size of dp"),
    (rolled, "dp=2,tp=2", "have no common ratio"),
    (experts_scaled, "dp=1,ep=4", "gradients of `experts` are 4 x: the size of ep"),
    (experts_partial, "dp=2,ep=2", "gradients of `router.weight` have no common ratio"),
    (experts_cut, "dp=2,ep=2", "gradients of `router.weight` are missing"),
    (context_scaled, "dp=1,cp=4", "gradients of all parameters are 4 x: the size of cp"),
    (context_positions, "dp=2,cp=2", "`rotary` is the first whose output is no part of that of one process (cp 1)"),
    (context_local_tokens, "dp=2,cp=2", "have no common ratio"),
    (pipeline_sum, "pp=4", "gradients of all parameters are 4 x"),
]
