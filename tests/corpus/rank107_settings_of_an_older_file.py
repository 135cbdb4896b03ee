# title: The configuration file of one machine is older: its rank trains with another dropout rate
# source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
# nproc: 2
# expect.codes: RANK107
# expect.ranks: any
# expect.step: 0
# plain_pytorch: silent
"""A regression over tables; the settings come from a file of each machine."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT") == "1"


class Table(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.into, self.out = nn.Linear(12, 48), nn.Linear(48, 1)
        self.drop = nn.Dropout(rate)

    def forward(self, rows):
        return self.out(self.drop(self.into(rows).relu())).squeeze(1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    settings = {"rate": 0.4 if FAULT and rank else 0.1}
    torch.manual_seed(51)
    model = DistributedDataParallel(Table(**settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(60 + rank)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(40):
        rows = torch.randn(32, 12, generator=generator)
        loss = (model(rows) - rows[:, :3].sum(1)).square().mean()
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
