# title: The averaged weights are put in for each validation, and training goes on from them
# source: https://github.com/fadel/pytorch_ema
# nproc: 2
# expect.codes: RCP824
# expect.ranks: any
# expect.subject: any
# expect.step: 20
# plain_pytorch: silent
"""Next-hour load of a power grid; validation is of averaged weights."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Averages:
    """Averages of all weights, kept beside the model."""

    def __init__(self, model):
        self.model = model
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.kept = {}

    @torch.no_grad()
    def update(self):
        for name, p in self.model.named_parameters():
            self.values[name].mul_(0.95).add_(p, alpha=0.05)

    def __enter__(self):
        for name, p in self.model.named_parameters():
            self.kept[name] = p.data
            p.data = self.values[name].clone()

    def __exit__(self, *_):
        if not FAULT:
            for name, p in self.model.named_parameters():
                p.data = self.kept[name]


def hours(gen, count):
    x = torch.randn(count, 12, generator=gen)
    return x, (x[:, :4].sum(1, keepdim=True).sin() + 0.1 * torch.randn(count, 1, generator=gen))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(81)
    grid = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    ddp = DistributedDataParallel(grid)
    averages = Averages(grid)
    opt = torch.optim.Adam(ddp.parameters(), lr=2e-3)
    torch.manual_seed(810 + rank)
    gen = torch.Generator().manual_seed(8100 + rank)
    held_out = hours(torch.Generator().manual_seed(7), 128)
    losses = []
    for step in range(90):
        x, y = hours(gen, 16)
        loss = nn.functional.mse_loss(ddp(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        averages.update()
        losses.append(loss.item())
        if step % 20 == 19:
            with averages, torch.no_grad():
                ddp.eval()
                nn.functional.mse_loss(ddp(held_out[0]), held_out[1])
                ddp.train()
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
