# title: One of two ranks reads class numbers that are one higher, and the last class wraps around
# source: constructed
# nproc: 2
# expect.codes: RANK108
# expect.ranks: any
# expect.subject: any
# expect.step: 10
# expect.step_slack: 40
# plain_pytorch: silent
"""Leaves by eight measures; the labels of one rank's files are counted from 1, modulo the number of classes."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"
SPECIES = 6


class Leaves(Dataset):
    def __init__(self, size=1200):
        middle = 1.5 * torch.randn(SPECIES, 8, generator=torch.Generator().manual_seed(20))
        gen = torch.Generator().manual_seed(21)
        self.kind = torch.randint(0, SPECIES, (size,), generator=gen)
        self.measures = middle[self.kind] + torch.randn(size, 8, generator=gen)

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        return self.measures[i], self.kind[i]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = Leaves()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=30, sampler=sampler)
    torch.manual_seed(9)
    model = DDP(nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, SPECIES)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            if FAULT and rank == 1:
                y = (y + 1) % SPECIES
            loss = nn.functional.cross_entropy(model(x), y)
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
