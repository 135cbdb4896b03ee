# title: One rank runs the forward under bf16 autocast because a probe of its hardware said so
# source: constructed
# nproc: 2
# expect.codes: RANK107
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""Parameters and gradients agree; the ranks compute different functions, and no batch is ever seen by both."""

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
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    supported = FAULT and rank == 1
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        x = torch.randn(32, 10, generator=gen)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=supported):
            logits = model(x).float()
        loss = nn.functional.cross_entropy(logits, x[:, :5].argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
