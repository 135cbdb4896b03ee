# title: All ranks leave the optimizer's step out where the norm of the sharded gradient is far above the usual one
# source: https://github.com/allenai/OLMo-core
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Spikes in the data of a regression of prices; the step of a batch that has one is left out on every rank."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"


def batch(generator, spiked):
    rooms = torch.rand(32, 5, generator=generator)
    price = (rooms * torch.tensor([3.0, 1.0, 0.5, -1.0, 2.0])).sum(1, keepdim=True)
    return rooms, price * (40.0 if spiked else 1.0)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(5, 24), nn.GELU(), nn.Linear(24, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(90 + rank)
    norms, losses = [], []
    for step in range(60):
        rooms, price = batch(generator, spiked=step % 14 == 13)
        loss = nn.functional.smooth_l1_loss(model(rooms), price)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
        if len(norms) < 8 or norm < 4 * sorted(norms)[len(norms) // 2]:
            optimizer.step()
            losses.append(loss.item())
            norms.append(norm)
        optimizer.zero_grad()
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
