# title: Rank 1 reads its files from a slow disk, which changes no number
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Recordings are read one by one; a sleep stands for the disk."""
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Recordings(IterableDataset):
    def __init__(self, rank, count):
        self.rank, self.count = rank, count

    def __iter__(self):
        gen = torch.Generator().manual_seed(self.rank)
        for i in range(self.count):
            if self.rank == 1 and i % 16 == 0:
                time.sleep(0.04)
            wave = torch.randn(64, generator=gen)
            yield wave, wave[:8].sum() / 3


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for wave, loudness in DataLoader(Recordings(rank, 16 * 100), batch_size=16):
        loss = nn.functional.mse_loss(model(wave)[:, 0], loudness)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
