"""HSDP, tensor parallelism and both with FSDP2 over four ranks; accumulation over two.

ranks: 4
parts: all
"""

import torch
from _report import batches, digest, finish, group, report, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def layers():
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


start()
group()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
hybrid = layers()
fully_shard(hybrid, mesh=mesh)
parallel = layers()
plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
parallelize_module(parallel, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), plan)
both = layers()
parallelize_module(both, mesh["shard"], plan)
fully_shard(both, mesh=mesh["replicate"])
losses, parts = [], []
for model in (hybrid, parallel, both):
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for i, x in enumerate(batches(6)):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss)
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    parts += [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
report([], [], losses, parts=digest(parts))
del model, hybrid, parallel, both, optimizer, parts, loss, losses
finish()
