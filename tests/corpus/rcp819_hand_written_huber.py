# title: a hand-written weighted Huber loss subtracts a (N,) target from a (N, 1) prediction
# source: constructed
# nproc: 2
# expect.codes: RCP819
# expect.ranks: all
# expect.step: 0
# expect.step_slack: 10
# plain_pytorch: silent
"""Demand regression with sample weights and a custom loss module."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class WeightedHuber(nn.Module):
    def __init__(self, delta=1.0):
        super().__init__()
        self.delta = delta

    def forward(self, pred, target, weight):
        err = (pred - target).abs()
        value = torch.where(err < self.delta, 0.5 * err**2, self.delta * (err - 0.5 * self.delta))
        return (value * weight).mean()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(36)
    model, criterion = DDP(nn.Sequential(nn.Linear(7, 40), nn.CELU(), nn.Linear(40, 1))), WeightedHuber()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen, losses = torch.Generator().manual_seed(rank), []
    for _ in range(60):
        x = torch.randn(40, 7, generator=gen)
        demand, weight = x[:, 0] * 2 + x[:, 1].abs(), 0.5 + torch.rand(40, generator=gen)
        pred = model(x)
        loss = criterion(pred if FAULT else pred.squeeze(1), demand, weight)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
