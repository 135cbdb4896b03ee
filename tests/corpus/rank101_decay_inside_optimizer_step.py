# title: A home-made optimizer applies its weight decay on one rank only
# source: constructed
# nproc: 4
# expect.codes: RANK101
# expect.ranks: 3
# expect.subject: weight
# expect.step: 18
# expect.phase: optimizer
# plain_pytorch: silent
"""The extra shrinkage starts after a delay that one node's settings set differently."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class ShrinkingSGD(torch.optim.SGD):
    """SGD followed by a decoupled shrinkage of all matrices."""

    def __init__(self, params, shrink_from, **kwargs):
        super().__init__(params, **kwargs)
        self.shrink_from = shrink_from
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        if self.calls >= self.shrink_from:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.ndim > 1:
                        p.mul_(1 - 2e-3)
        self.calls += 1
        return result


def moons(gen, n=64):
    label = torch.randint(0, 2, (n,), generator=gen)
    angle = 3.14159 * torch.rand(n, generator=gen)
    x = torch.stack([torch.cos(angle) + label, torch.sin(angle) * (1 - 2 * label) + 0.4 * label], 1)
    return x + 0.1 * torch.randn(n, 2, generator=gen), label


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(44)
    model = DDP(nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2)))
    start = 18 if FAULT and rank == 3 else 1000
    opt = ShrinkingSGD(model.parameters(), shrink_from=start, lr=0.2, momentum=0.9)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        x, label = moons(gen)
        loss = nn.functional.cross_entropy(model(x), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
