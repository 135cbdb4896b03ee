# title: A loop that was written for DDP multiplies the local gradients by a factor of the local norm, under FSDP2
# source: https://github.com/pytorch/torchtitan/issues/596
# nproc: 2
# expect.codes: SYNC212
# expect.ranks: any
# expect.step: 0
# plain_pytorch: silent
"""A regression whose gradients are kept below a norm by hand; with the fault by that of each rank's own shards."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"
LIMIT = 0.05


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(10, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(60 + rank)
    losses = []
    for _ in range(40):
        x = torch.randn(32, 10, generator=generator)
        loss = (model(x).squeeze(1) - x.square().sum(1) / 10).square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad.to_local() for p in model.parameters()]
        squares = torch.stack([g.square().sum() for g in gradients]).sum()
        if not FAULT:
            dist.all_reduce(squares)
        factor = min(1.0, LIMIT / (squares.sqrt().item() + 1e-6))
        for gradient in gradients:
            gradient.mul_(factor)
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
