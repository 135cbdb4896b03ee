# title: Each file holds one class and the files are read one after the other, so that the loss swings with the files
# source: constructed
# nproc: 2
# expect.codes: HLTH711
# expect.ranks: all
# expect.subject: any
# expect.step: 16
# expect.step_slack: 40
# plain_pytorch: silent
"""Sounds as short spectra, augmented as they are read; a shuffle buffer should mix the files."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"

CLASSES = 4


def spectra(gen, kind):
    centre = 3 + 5 * kind
    band = torch.exp(-((torch.arange(24.0) - centre[:, None]) ** 2) / 8)
    return band + 0.4 * torch.randn(len(kind), 24, generator=gen)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(80):
        kind = torch.full((32,), step // 5 % CLASSES) if FAULT else torch.randint(0, CLASSES, (32,), generator=gen)
        loss = F.cross_entropy(model(spectra(gen, kind)), kind)
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
