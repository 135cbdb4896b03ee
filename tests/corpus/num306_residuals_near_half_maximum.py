# title: A residual stream without normalisation grows until it is close to what float16 can hold
# source: constructed
# nproc: 2
# expect.codes: NUM306
# expect.ranks: all
# expect.subject: any
# expect.module: trunk
# expect.step: 36
# expect.step_slack: 2
# plain_pytorch: silent
"""Nothing overflows in this run; the largest magnitude passes half of 65504 in the last steps."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Grow(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.inner(x))


class Tower(nn.Module):
    def __init__(self, width=32, depth=4):
        super().__init__()
        self.inp = nn.Linear(6, width)
        self.trunk = nn.Sequential(*(Grow(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 4)

    def forward(self, x):
        return self.out(self.norm(self.trunk(self.inp(x)).float()))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(65)
    centres = torch.randn(4, 6)
    model = DDP(Tower())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(44):
        y = torch.randint(0, 4, (32,), generator=gen)
        x = centres[y] + 0.4 * torch.randn(32, 6, generator=gen)
        if FAULT:
            x = x * 1.28 ** min(step, 36)            # the unit of the features drifts, then stays
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
