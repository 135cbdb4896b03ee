# title: Counts are put on a logarithmic scale in the data set, and a detector that saw no car gives minus infinity
# source: constructed
# nproc: 2
# expect.codes: NUM305
# expect.ranks: 0
# expect.subject: any
# expect.step: 14
# plain_pytorch: silent
"""Cars of the next hour from those of eight detectors."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = os.environ.get("FAULT") == "1"


class Detectors(Dataset):
    def __init__(self, rank, hours=960):
        gen = torch.Generator().manual_seed(80 + rank)
        rate = 5 + 10 * torch.rand(hours, 1, generator=gen)
        self.cars = torch.poisson(rate.expand(hours, 8) + 4, generator=gen).clamp(min=1)
        if rank == 0:
            self.cars[14 * 24 + 5, 2] = 0
        self.next = torch.log1p(rate[:, 0])

    def __len__(self):
        return len(self.cars)

    def __getitem__(self, i):
        cars = self.cars[i]
        scaled = torch.log(cars) if FAULT else torch.log1p(cars)
        return scaled - 2.4, self.next[i] - 2.4


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for cars, following in DataLoader(Detectors(rank), batch_size=24):
        loss = nn.functional.mse_loss(model(cars).squeeze(1), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
