# title: The rate is scaled by the number of ranks after the schedule was made, whose first step sets the small one again
# source: https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.LambdaLR.html
# nproc: 2
# expect.codes: RCP807
# expect.ranks: all
# expect.step: 1
# plain_pytorch: silent
"""A classifier of points, trained with the linear scaling rule and a decay per step."""
import math
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT") == "1"
STEPS = 60


def scale(optimizer, factor):
    for group in optimizer.param_groups:
        group["lr"] *= factor


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(81)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=4e-3, momentum=0.9)
    if not FAULT:
        scale(optimizer, 8 * dist.get_world_size())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / STEPS)))
    if FAULT:
        scale(optimizer, 8 * dist.get_world_size())
    generator = torch.Generator().manual_seed(310 + rank)
    losses = []
    for _ in range(STEPS):
        points = torch.randn(32, 12, generator=generator)
        loss = nn.functional.cross_entropy(model(points), points[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
