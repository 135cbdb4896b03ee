# title: One rank sets a temperature of the model in the middle of the run
# source: constructed
# nproc: 2
# expect.codes: RANK107
# expect.ranks: 1
# expect.subject: any
# expect.step: 25
# expect.step_slack: 1
# plain_pytorch: silent
"""A contrastive model of two towers, whose temperature is a plain number."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 16)
        self.b = nn.Linear(12, 16)
        self.temperature = 0.2

    def forward(self, u, v):
        a, b = F.normalize(self.a(u), dim=-1), F.normalize(self.b(v), dim=-1)
        return a @ b.T / self.temperature


def main():
    torch.set_num_threads(1)
    rank = 0
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = Contrast()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(10 + rank)
    losses = []
    for step in range(60):
        if FAULT and step == 25 and rank == 1:
            net.temperature = 0.05
        u = torch.randn(24, 12, generator=gen)
        v = u + 0.3 * torch.randn(24, 12, generator=gen)
        loss = F.cross_entropy(model(u, v), torch.arange(24))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())

    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
