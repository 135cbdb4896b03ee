# title: Gradients are averaged over the other dimension of the mesh, inside pairs that hold the same samples
# source: constructed
# nproc: 4
# expect.codes: SYNC211
# expect.ranks: any
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Four ranks, all with data of their own; the mesh was laid out for a second dimension that is not used yet."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT") == "1"


def main():
    shape = (2, 2) if FAULT else (4, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "spare"))
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.ELU(), nn.Linear(20, 1))
    model = DDP(net, process_group=mesh["data"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    gen = torch.Generator().manual_seed(1000 + rank)
    for step in range(50):
        x = torch.randn(24, 6, generator=gen)
        loss = nn.functional.mse_loss(model(x)[:, 0], x[:, 0] - x[:, 1] * x[:, 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
