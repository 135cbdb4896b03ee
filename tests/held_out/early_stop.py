# title: Each rank stops early by its own validation loss, and rank 1 leaves first
# source: constructed
# nproc: 2
# expect.codes: FAIL1024, HANG503
# expect.ranks: any
# expect.subject: any
# expect.step: any
# plain_pytorch: error
"""Prices of flats with early stopping."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

FAULT = os.environ.get("FAULT") == "1"


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def __call__(self, loss):
        if not FAULT:
            loss = loss.clone()
            dist.all_reduce(loss)
        if loss < self.best - 0.02:
            self.best, self.bad = loss.item(), 0
        else:
            self.bad += 1
        return self.bad > self.patience


def flats(gen, rank, n):
    x = torch.randn(n, 6, generator=gen)
    noise = 0.1 + 1.4 * rank
    return x, x[:, :1] * x[:, 1:2] + x[:, 2:3] + noise * torch.randn(n, 1, generator=gen)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(rank)
    x_val, y_val = flats(gen, rank, 128)
    stop = EarlyStopping(patience=1)
    for epoch in range(30):
        for _ in range(6):
            x, y = flats(gen, rank, 32)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            model.eval()
            val = nn.functional.mse_loss(model.module(x_val), y_val)
            model.train()
        if stop(val):
            break
    print(f"rank {rank} left after epoch {epoch}: {val.item():.3f}", flush=True)


main()
