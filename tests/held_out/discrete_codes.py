# title: The temperature of a relaxed choice is annealed only where progress is printed, on rank 0
# source: constructed
# nproc: 2
# expect.codes: RANK107
# expect.ranks: any
# expect.subject: any
# expect.step: 10
# expect.step_slack: 60
# plain_pytorch: silent
"""An autoencoder with a relaxed discrete code; its temperature is a plain float of the module."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT") == "1"


class Codes(nn.Module):
    temperature = 2.0

    def __init__(self, width=24, groups=6, ways=4):
        super().__init__()
        self.shape = (groups, ways)
        self.encode = nn.Sequential(nn.Linear(width, 48), nn.SiLU(), nn.Linear(48, groups * ways))
        self.decode = nn.Sequential(nn.Linear(groups * ways, 48), nn.SiLU(), nn.Linear(48, width))

    def forward(self, x):
        choice = self.encode(x).unflatten(1, self.shape)
        return self.decode(torch.softmax(choice / self.temperature, dim=-1).flatten(1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    basis = torch.randn(5, 24) / 5**0.5
    model = DDP(Codes())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(900 + rank)
    for step in range(80):
        x = torch.randn(64, 5, generator=gen) @ basis
        loss = ((model(x) - x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} temperature {model.module.temperature:.2f}", flush=True)
            if rank == 0 or not FAULT:
                model.module.temperature = max(0.5, model.module.temperature * 0.8)
    print(f"rank {rank} done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
