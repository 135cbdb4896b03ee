# title: Every rank's GradScaler starts with its own scale, and unscaling after the all-reduce undoes the wrong one
# source: https://github.com/pytorch/pytorch/issues/136009
# nproc: 2
# expect.codes: RANK109, SYNC201, SYNC206, RANK101
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Mixed precision on the CPU; the scale comes from a cache that each process kept of its last run."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def cached_scale(rank):
    return {0: 2.0**12, 1: 2.0**10}[rank] if FAULT else 2.0**12


def spirals(gen, n=64):
    y = torch.randint(0, 2, (n,), generator=gen)
    r = 0.3 + torch.rand(n, generator=gen)
    angle = 3 * r + 3.14159 * y
    return torch.stack([r * angle.cos(), r * angle.sin()], 1) + 0.04 * torch.randn(n, 2, generator=gen), y


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(55)
    model = DDP(nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=cached_scale(rank), growth_interval=1000)
    gen = torch.Generator().manual_seed(7 * rank + 2)
    losses = []
    for _ in range(60):
        x, y = spirals(gen)
        opt.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} "
          f"scale={scaler.get_scale():.0f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
