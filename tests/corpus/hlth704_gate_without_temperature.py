# title: The gate's scores are multiplied by a hundred where they should be divided
# source: constructed
# nproc: 2
# expect.codes: HLTH704
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 12
# plain_pytorch: silent
"""A mixture of four experts."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(10, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 1)) for _ in range(4))

    def forward(self, x):
        scores = self.gate(x)
        if FAULT:
            scores = scores * 100
        weights = scores.softmax(-1)
        outs = torch.stack([expert(x)[:, 0] for expert in self.experts], 1)
        return (weights * outs).sum(1)


def main():
    torch.set_num_threads(1)
    rank = 0
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(Gated())
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(10 + rank)
    losses = []
    for step in range(60):
        x = torch.randn(32, 10, generator=gen)
        loss = F.mse_loss(model(x), torch.sin(x[:, 0]) + x[:, 1] * x[:, 2])
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
