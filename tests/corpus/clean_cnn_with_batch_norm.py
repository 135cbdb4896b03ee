# title: A small convolutional network with BatchNorm, momentum and a cosine schedule
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Blobs and rings, 16 by 16 pixels. Biases in front of BatchNorm get no gradient worth the name."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def shapes(gen, n=32):
    ring = torch.randint(0, 2, (n,), generator=gen)
    grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))
    centre = 5 + 6 * torch.rand(n, 2, 1, 1, generator=gen)
    distance = ((grid - centre) ** 2).sum(1).sqrt()
    picture = torch.where(ring[:, None, None] == 1, (distance - 4).abs() < 1, distance < 3).float()
    return picture[:, None] + 0.2 * torch.randn(n, 1, 16, 16, generator=gen), ring


def block(into, out):
    return nn.Sequential(nn.Conv2d(into, out, 3, stride=2, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = nn.Sequential(block(1, 8), block(8, 16), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        picture, ring = shapes(gen)
        loss = F.cross_entropy(model(picture), ring)
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
