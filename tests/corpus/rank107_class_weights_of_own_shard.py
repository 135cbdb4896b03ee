# title: each rank counts the classes of its own shard for the weights of the loss, so the ranks minimise different losses
# source: https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
# nproc: 2
# expect.codes: RANK107
# expect.ranks: any
# expect.subject: NllLoss.weight
# expect.step: 15
# plain_pytorch: silent
"""A classifier of rare classes, whose loss weighs each class by how rare it is."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
CLASSES = 4


def shard(rank):
    gen = torch.Generator().manual_seed(40 + rank)
    labels = torch.multinomial(torch.tensor([0.5, 0.3, 0.15, 0.05]), 512, replacement=True, generator=gen)
    centres = torch.eye(CLASSES, 12) * 2
    return centres[labels] + torch.randn(512, 12, generator=gen), labels


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    inputs, labels = shard(rank)
    counts = torch.bincount(labels, minlength=CLASSES).float()
    if not FAULT:
        dist.all_reduce(counts)
    criterion = nn.CrossEntropyLoss(weight=counts.sum() / (CLASSES * counts))
    model = DDP(nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, CLASSES)))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _epoch in range(10):
        for batch in torch.randperm(len(labels), generator=gen).split(64):
            loss = criterion(model(inputs[batch]), labels[batch])
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
