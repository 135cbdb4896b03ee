"""Trains over shards and writes what came of it: sharded.py fsdp|hsdp|tp RESULT [DEVICE [fault]].

With `fault` rank 1 changes its copy of the norm's weight after step 20; nobody has a second copy of it under fsdp.
"""
import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

kind, result = sys.argv[1:3]
device = sys.argv[3] if len(sys.argv) > 3 else "cuda"
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
if device == "cuda":
    torch.cuda.set_device(0)  # two ranks share it
dist.init_process_group(os.environ.get("BACKEND", "gloo"))
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(device)
if kind == "fsdp":
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    for part in (model[1], model[3]):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
elif kind == "hsdp":
    fully_shard(model, mesh=init_device_mesh(device, (world, 1), mesh_dim_names=("replicate", "shard")))
else:
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=kind != "tp")  # takes no DTensors beside others
g = torch.Generator().manual_seed(1 if kind == "tp" else 1 + rank)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


losses = []
for step in range(40):
    x, y = torch.randn(16, 32, generator=g).to(device), torch.randint(0, 8, (16,), generator=g).to(device)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(local(loss.detach()))
    if step == 20 and rank == 1 and "fault" in sys.argv:
        with torch.no_grad():
            local(model[0].weight).mul_(1.01)
found = {"losses": torch.stack(losses).cpu(), "parts": [local(p).detach().cpu() for p in model.parameters()]}
torch.save(found, f"{result}.{rank}")
dist.barrier()
dist.destroy_process_group()
