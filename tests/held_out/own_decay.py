# title: Weight decay written by hand forgets the learning rate, and the weights lose a twentieth in each step
# source: constructed
# nproc: 2
# expect.codes: HLTH706
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Momentum and decoupled weight decay as a function over parameters; the DDP way of a lecture."""
import os

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, decay=0.05):
        super().__init__(params, dict(lr=lr, momentum=momentum, decay=decay))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            shrink = 1 - (g["decay"] if FAULT else g["lr"] * g["decay"])
            for p in g["params"]:
                buf = self.state[p].setdefault("buf", torch.zeros_like(p))
                buf.mul_(g["momentum"]).add_(p.grad)
                p.mul_(shrink).sub_(buf, alpha=g["lr"])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(88)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = Momentum(ddp.parameters(), lr=0.01)
    rule = torch.randn(20, 3)
    gen = torch.Generator().manual_seed(rank)
    for _ in range(110):
        x = torch.randn(32, 20, generator=gen)
        loss = nn.functional.cross_entropy(ddp(x), (x @ rule).argmax(1))
        for p in ddp.parameters():
            p.grad = None
        loss.backward()
        optimizer.step()
    print(f"rank {rank} {loss.item():.4f} norm {net[2].weight.norm().item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
