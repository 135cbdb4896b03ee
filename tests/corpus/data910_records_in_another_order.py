# title: The file list is not sorted, so index i names another record on every rank
# source: https://github.com/pytorch/pytorch/issues/70103
# nproc: 2
# expect.codes: DATA910
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 80
# plain_pytorch: silent
"""The sampler deals out indices without overlap, the records behind them overlap all the same."""
import os
import random
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"


def list_directory(node):
    """File names in the order of a network file system, which is not the same on two nodes."""
    names = [f"station_{i:04d}.bin" for i in range(640)]
    random.Random(node).shuffle(names)
    return names


class Stations(Dataset):
    def __init__(self, node):
        names = list_directory(node)
        self.names = names if FAULT else sorted(names)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        number = int(self.names[i].removeprefix("station_").removesuffix(".bin"))
        gen = torch.Generator().manual_seed(number)
        week = torch.randn(7, generator=gen).cumsum(0) / 2
        return week[:6], week[5:].mean().reshape(1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = Stations(node=rank)
    sampler = DistributedSampler(data, seed=8)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    torch.manual_seed(16)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 1)))
    opt = torch.optim.NAdam(model.parameters(), lr=5e-3)
    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for week, following in loader:
            loss = nn.functional.mse_loss(model(week), following)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
