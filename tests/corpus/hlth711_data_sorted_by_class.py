# title: The data are sorted by class and read in order, so that the loss swings once per pass
# source: constructed
# nproc: 2
# expect.codes: HLTH711
# expect.ranks: all
# expect.subject: any
# expect.step: 16
# expect.step_slack: 64
# plain_pytorch: silent
"""Digits drawn from prototypes; the sampler should mix them."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"



def digits(rank, size=192):
    prototypes = torch.randn(4, 24, generator=torch.Generator().manual_seed(3))
    gen = torch.Generator().manual_seed(rank)
    label = torch.arange(size) * 4 // size
    return prototypes[label] + 0.8 * torch.randn(size, 24, generator=gen), label


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
    pictures, labels = digits(rank)
    gen = torch.Generator().manual_seed(50 + rank)
    losses = []
    for _ in range(8):
        order = torch.arange(len(labels)) if FAULT else torch.randperm(len(labels), generator=gen)
        for rows in order.split(16):
            loss = F.cross_entropy(model(pictures[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
