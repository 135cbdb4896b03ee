# title: An endless data set makes the same stream on every rank
# source: constructed
# nproc: 2
# expect.codes: DATA901
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 20
# plain_pytorch: silent
"""Sensors of a machine, simulated while training goes on."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

FAULT = os.environ.get("FAULT") == "1"


class Simulation(IterableDataset):
    def __init__(self, seed, batches):
        self.seed, self.batches = seed, batches

    def __iter__(self):
        gen = torch.Generator().manual_seed(self.seed)
        for _ in range(self.batches):
            state = torch.randn(32, 4, generator=gen)
            seen = torch.cat([state, state**2 - 1, 0.2 * torch.randn(32, 4, generator=gen)], 1)
            yield {"seen": seen, "wear": state[:, 0] - state[:, 1].abs()}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = Simulation(seed=1 if FAULT else 1 + rank, batches=60)
    for batch in DataLoader(data, batch_size=None):
        loss = nn.functional.mse_loss(model(batch["seen"])[:, 0], batch["wear"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
