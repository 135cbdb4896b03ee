# title: A clamp with its bounds the wrong way round makes all features zero: the loss stays at log C exactly
# source: constructed
# nproc: 2
# expect.codes: HLTH714, HLTH709
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 8
# plain_pytorch: silent
"""Gestures from six sensors, a bounded activation written by hand."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Bounded(nn.Module):
    def forward(self, x):
        x = torch.relu(x)
        return x.clamp(max=0.0 if FAULT else 6.0)


def gestures(gen, n=40):
    kind = torch.randint(0, 5, (n,), generator=gen)
    pattern = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    return pattern[kind] + 0.5 * torch.randn(n, 6, generator=gen), kind


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(6, 40), Bounded(), nn.Linear(40, 5, bias=False)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        sensors, kind = gestures(gen)
        loss = F.cross_entropy(model(sensors), kind)
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
