# title: Streams are split by file and not cut to one length, so that one rank runs out of data
# source: constructed
# nproc: 2
# expect.codes: DATA905
# expect.ranks: 0
# expect.subject: loader
# expect.step: 59
# expect.step_slack: 1
# plain_pytorch: error
"""Meter readings from files of different length, read as a stream; there is nothing that could tell its length."""
import itertools
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Readings(IterableDataset):
    def __init__(self, most):
        self.files, self.most = [240, 440, 240, 440], most

    def __iter__(self):
        return itertools.islice(self.read(), self.most)

    def read(self):
        for number in range(rank, len(self.files), world):
            gen = torch.Generator().manual_seed(70 + number)
            for _ in range(self.files[number]):
                hours = torch.rand(6, generator=gen)
                yield hours, hours.sum().sin() + 0.05 * torch.randn((), generator=gen)


def main():
    torch.manual_seed(9)
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(Readings(None if FAULT else 480), batch_size=8)
    losses = []
    for hours, load in loader:
        loss = nn.functional.mse_loss(model(hours).squeeze(1), load)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)


main()
time.sleep(0.3)
dist.destroy_process_group()
