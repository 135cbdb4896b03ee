# title: `fully_shard` is given the dimension of the mesh that has one rank, and no gradient is reduced
# source: https://github.com/volcengine/verl/issues/7493
# nproc: 2
# expect.codes: SYNC211, SYNC201
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""A classifier of points in rings, sharded within a host; each of two hosts has one rank here."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"


def batch(generator, size=32):
    ring = torch.randint(0, 3, (size,), generator=generator)
    angle = torch.rand(size, generator=generator) * 6.283
    radius = ring + 1 + 0.1 * torch.randn(size, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), ring


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("hosts", "host"))
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    fully_shard(model, mesh=mesh["host"] if FAULT else mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(80 + rank)
    losses = []
    for _ in range(40):
        points, rings = batch(generator)
        loss = nn.functional.cross_entropy(model(points), rings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
