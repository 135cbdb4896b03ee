# title: A loop with a loss scaler lost the line that updates it
# source: https://github.com/Azure/MS-AMP/pull/45
# nproc: 2
# expect.codes: FAIL1034
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: error
"""Fits a plane by robust regression with a loss scaler; its second step raises without an update in between."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DDP(nn.Sequential(nn.Linear(12, 40), nn.Mish(), nn.Linear(40, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    plane = torch.randn(12, 1, generator=torch.Generator().manual_seed(9))
    gen = torch.Generator().manual_seed(33 + rank)
    curve = []
    for _ in range(60):
        points = torch.randn(32, 12, generator=gen)
        height = points @ plane + 0.1 * torch.randn(32, 1, generator=gen)
        optimizer.zero_grad()
        loss = nn.functional.huber_loss(model(points), height)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if not FAULT:
            scaler.update()
        curve.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
