# title: A pruning mask computed from a local batch zeroes other gradient entries on one rank
# source: constructed
# nproc: 4
# expect.codes: SYNC206, SYNC201, RANK101
# expect.ranks: 3
# expect.subject: any
# expect.step: 16
# plain_pytorch: silent
"""Sparse training; ranks 0 to 2 read the mask of a file, rank 3 misses the file and makes its own."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
START = 16


def make_masks(net, seed):
    gen = torch.Generator().manual_seed(seed)
    return {name: (torch.rand(p.shape, generator=gen) > 0.3).float()
            for name, p in net.named_parameters() if p.ndim == 2}


def mask_gradients(net, masks):
    for name, p in net.named_parameters():
        if name in masks:
            p.grad.mul_(masks[name])


def checkerboard(gen, n=64):
    xy = torch.rand(n, 2, generator=gen) * 2 - 1
    return torch.cat([xy, xy.square(), torch.sin(3.14 * xy)], 1), (xy[:, 0] * xy[:, 1] > 0).long()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(29)
    net = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 2))
    masks = make_masks(net, seed=rank if FAULT and rank == 3 else 0)
    model = DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(400 + rank)
    losses = []
    for step in range(60):
        x, y = checkerboard(gen)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        if step >= START:
            mask_gradients(net, masks)
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
