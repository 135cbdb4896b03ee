# title: FSDP2's gradient synchronisation is switched on for the first micro-batch in place of the last
# source: constructed after reports of accumulation with set_requires_gradient_sync
# nproc: 2
# expect.codes: SYNC205
# expect.step: 0
# plain_pytorch: silent
"""Accumulation under FSDP2 whose condition for the last micro-batch counts from one."""
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT", "0") == "1"
MICRO = 2


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 4))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), 2e-3)
    gen = torch.Generator().manual_seed(50 + rank)
    teacher = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(20):
        for micro in range(MICRO):
            number = step * MICRO + micro
            model.set_requires_gradient_sync(number % MICRO == 0 if FAULT else micro == MICRO - 1)
            x = torch.randn(32, 12, generator=gen)
            loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1)) / MICRO
            loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item() * MICRO)
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
