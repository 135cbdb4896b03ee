# title: The drop rate is raised on one rank only
# source: constructed
# nproc: 2
# expect.codes: RANK107
# expect.ranks: 0
# expect.subject: any
# expect.step: 30
# expect.step_slack: 1
# plain_pytorch: silent
"""Dropout is drawn on each rank by itself, so that only the rate can differ."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def build():
    return nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 3))


def main():
    torch.set_num_threads(1)
    rank = 0
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(build())
    torch.manual_seed(100 + rank)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    gen = torch.Generator().manual_seed(10 + rank)
    losses = []
    for step in range(70):
        if FAULT and step == 30 and rank == 0:
            for part in model.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.6
        x = torch.randn(32, 8, generator=gen)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
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
