# title: On one rank the label file is shifted against the images, so its loss never falls with the others'
# source: constructed
# nproc: 4
# expect.codes: RANK108
# expect.ranks: 3
# expect.subject: any
# expect.step: 10
# expect.step_slack: 50
# plain_pytorch: silent
"""Glyph classification from shards; the shard of rank 3 was joined with the labels one row off."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"
CLASSES, PIXELS = 6, 36


def read_shard(rank, size=480):
    glyphs = torch.randn(CLASSES, PIXELS, generator=torch.Generator().manual_seed(5))
    gen = torch.Generator().manual_seed(100 + rank)
    labels = torch.randint(0, CLASSES, (size,), generator=gen)
    images = glyphs[labels] + 1.5 * torch.randn(size, PIXELS, generator=gen)
    if FAULT and rank == 3:
        labels = labels.roll(1)
    return TensorDataset(images, labels)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(71)
    net = nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    model = DistributedDataParallel(net)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(read_shard(rank), batch_size=24, shuffle=True, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(4):
        for images, labels in loader:
            sgd.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            sgd.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
