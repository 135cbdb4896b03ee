# title: A warm-up that begins at the peak: the first step throws all units of a layer below zero
# source: constructed
# nproc: 2
# expect.codes: HLTH703, HLTH709, HLTH714
# expect.ranks: all
# expect.subject: any
# expect.step: 2
# expect.step_slack: 12
# plain_pytorch: silent
"""Small pictures of bars, a convolution without normalisation."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def bars(gen, n=48):
    kind = torch.randint(0, 3, (n,), generator=gen)
    pictures = 0.3 * torch.rand(n, 1, 12, 12, generator=gen)
    for i, k in enumerate(kind.tolist()):
        where = int(torch.randint(0, 12, (1,), generator=gen))
        if k == 0:
            pictures[i, 0, where] += 1
        elif k == 1:
            pictures[i, 0, :, where] += 1
    return pictures, kind


def network():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, stride=2), nn.ReLU(), nn.Conv2d(12, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)
    )


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=60.0 if FAULT else 0.06)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 1 or not FAULT else 0.001)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        pictures, kind = bars(gen)
        loss = F.cross_entropy(model(pictures), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
