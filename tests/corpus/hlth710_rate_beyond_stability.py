# title: The learning rate is beyond what this curvature allows: every step overshoots by more
# source: constructed
# nproc: 2
# expect.codes: HLTH710
# expect.ranks: all
# expect.subject: any
# expect.step: 8
# expect.step_slack: 20
# plain_pytorch: silent
"""Linear regression on features that were not scaled."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def readings(gen, n=64):
    x = torch.randn(n, 6, generator=gen) * torch.tensor([1.0, 1.0, 3.0, 1.0, 2.0, 1.0])
    return x, (x @ torch.tensor([0.5, -1.0, 0.3, 2.0, 0.1, 1.0]))[:, None]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.16 if FAULT else 0.016)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        x, y = readings(gen)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
