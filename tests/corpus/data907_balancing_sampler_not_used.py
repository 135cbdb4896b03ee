# title: A sampler that balances the classes is made and not given to the loader
# source: constructed
# nproc: 2
# expect.codes: DATA907
# expect.ranks: all
# expect.subject: class 0
# expect.step: 0
# plain_pytorch: silent
"""Faulty bearings among healthy ones, three in a hundred, each rank with its own share of the recordings."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

FAULT = os.environ.get("FAULT", "0") == "1"


def bearings(rank, world, n=1600):
    gen = torch.Generator().manual_seed(15)
    broken = (torch.rand(n, generator=gen) < 0.03).long()
    spectrum = torch.randn(n, 20, generator=gen)
    spectrum[:, 5:8] += 1.5 * broken[:, None]
    return spectrum[rank::world], broken[rank::world]


def loader_of(spectrum, broken, rank):
    weights = 1.0 / torch.bincount(broken).double()
    gen = torch.Generator().manual_seed(100 + rank)
    balanced = WeightedRandomSampler(weights[broken], len(broken), generator=gen)
    data = TensorDataset(spectrum, broken)
    if FAULT:
        return DataLoader(data, batch_size=50, shuffle=True, generator=gen)
    return DataLoader(data, batch_size=50, sampler=balanced)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    spectrum, broken = bearings(rank, world)
    torch.manual_seed(21)
    model = DDP(nn.Sequential(nn.Linear(20, 40), nn.SiLU(), nn.Linear(40, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    loader = loader_of(spectrum, broken, rank)
    losses = []
    for _ in range(4):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
