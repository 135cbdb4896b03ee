# title: A layer-wise optimizer divides by the gradient's norm, which is 0 while a branch is switched off
# source: constructed
# nproc: 4
# expect.codes: NUM304
# expect.ranks: all
# expect.subject: side
# expect.step: 23
# plain_pytorch: silent
"""LARS in a few lines; from step 23 on the side branch is multiplied with 0, and its gradient is exactly 0."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr, trust=0.02, eps=1e-9):
        super().__init__(params, {"lr": lr, "trust": trust, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                ratio = group["trust"] * p.norm() / (p.grad.norm() + group["eps"])
                p -= group["lr"] * ratio * p.grad


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(7, 32), nn.ELU(), nn.Linear(32, 1))
        self.side = nn.Sequential(nn.Linear(7, 16), nn.ELU(), nn.Linear(16, 1))

    def forward(self, x, weight):
        return self.main(x) + weight * self.side(x)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(23)
    model = DDP(TwoBranches())
    opt = LARS(model.parameters(), lr=1.0, eps=0.0 if FAULT else 1e-9)
    gen = torch.Generator().manual_seed(10 + rank)
    losses = []
    for step in range(45):
        x = torch.randn(48, 7, generator=gen)
        y = (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3]
        loss = (model(x, max(0.0, 1.0 - step / 23)) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
