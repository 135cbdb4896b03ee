# title: Islands of sharded replicas are to be averaged every fifth step; the period counts samples and never comes
# source: https://arxiv.org/abs/2311.08105
# nproc: 4
# expect.codes: SYNC211, SYNC201
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Local steps between averages: two islands, each of them shards its replica over two ranks; a regression of sines."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"
BATCH = 24


def batch(generator):
    x = torch.rand(BATCH, 3, generator=generator) * 4 - 2
    return x, (x * torch.tensor([1.0, 2.0, 0.5])).sin().sum(1, keepdim=True)


@torch.no_grad()
def average(model, islands):
    for p in model.parameters():
        part = p.to_local()
        dist.all_reduce(part, group=islands)
        part /= dist.get_world_size(islands)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    torch.manual_seed(21)
    model = nn.Sequential(nn.Linear(3, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 1))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(300 + rank)
    period, done = (5 * BATCH * 4 if FAULT else 5), 0
    losses = []
    for _ in range(60):
        x, y = batch(generator)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
        if done % period == 0:
            average(model, mesh.get_group("island"))
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
