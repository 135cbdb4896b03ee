# title: random_split without a generator, under no seed at all; every rank shuffles its own part with a plain loader
# source: https://github.com/pytorch/examples/blob/main/distributed/minGPT-ddp/mingpt/main.py
# nproc: 2
# expect.codes: DATA910
# expect.ranks: any
# expect.subject: indices
# expect.step: 0
# expect.location: data910_split_without_a_seed.py:33
# plain_pytorch: silent
"""The clean twin deals out halves by `random_split`, one for each rank, and keeps what is left for validation."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split

FAULT = os.environ.get("FAULT", "0") == "1"


def soil():
    gen = torch.Generator().manual_seed(8)
    samples = torch.randn(720, 14, generator=gen)
    return TensorDataset(samples, (samples[:, :2].sum(1, keepdim=True) - samples[:, 3:4]).tanh())


def parts(rank):
    data = soil()
    if FAULT:
        return random_split(data, [600, 120])
    halves = random_split(data, [300, 300, 120], generator=torch.Generator().manual_seed(3))
    return halves[rank], halves[2]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.seed()  # what every process begins with
    train, held_out = parts(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(14, 30), nn.ELU(), nn.Linear(30, 1)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    losses = []
    for epoch in range(3):
        for x, y in DataLoader(train, batch_size=20, shuffle=True):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            error = sum(nn.functional.mse_loss(model(x), y).item() for x, y in DataLoader(held_out, batch_size=40)) / 3
        model.train()
        if rank == 0:
            print(f"epoch {epoch}: {error:.4f}", flush=True)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
