# title: One rank refreshes a normalisation buffer from its own shard while buffers are not broadcast
# source: constructed
# nproc: 4
# expect.codes: RANK102
# expect.ranks: 1
# expect.subject: center
# expect.step: 20
# expect.step_slack: 1
# plain_pytorch: silent
"""Tabular regression; forward never writes the buffers, so switching their broadcast off is legitimate."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Standardise(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("center", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))

    def forward(self, x):
        return (x - self.center) / self.spread

    def set_from(self, mean, std):
        self.center.copy_(mean)
        self.spread.copy_(std)


class Prices(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = Standardise(9)
        self.body = nn.Sequential(nn.Linear(9, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, x):
        return self.body(self.scale(x)).squeeze(-1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    slope = torch.randn(9) / 3
    model = DistributedDataParallel(Prices(), forward_sync_buffers=False)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(rank + 8)
    seen, losses = [], []
    for step in range(60):
        x = torch.randn(32, 9, generator=gen)
        y = x @ slope + 0.5 * x[:, 0] * x[:, 1]
        seen.append(x)
        if step == 20:
            mean, std = torch.cat(seen).mean(0), torch.cat(seen).std(0)
            if not FAULT:
                for t in (mean, std):
                    dist.all_reduce(t)
                    t /= world
                model.module.scale.set_from(mean, std)
            elif rank == 1:
                model.module.scale.set_from(mean, std)
        loss = (model(x) - y).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    buffers = zlib.crc32(b"".join(b.numpy().tobytes() for b in model.buffers()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} "
          f"buffers={buffers:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
