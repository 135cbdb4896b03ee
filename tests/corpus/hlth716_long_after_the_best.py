# title: Training goes on for many evaluations after the best one, with a rate that has decayed to nothing
# source: constructed
# nproc: 2
# options: --validation-loss functions
# expect.codes: HLTH716, HLTH712
# expect.ranks: all
# expect.subject: any
# expect.step: 12
# expect.step_slack: 14
# plain_pytorch: silent
"""A regression with noise that no model can predict. Four batches are evaluated through the raw module."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def samples(seed, n=128):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=gen)
    return x, x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.5]) + 0.5 * torch.randn(n, generator=gen)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.006, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4 if FAULT else 60, gamma=0.1)
    x_val, y_val = samples(500, 256)
    losses = []
    for step in range(80):
        x, y = samples(1000 * rank + step)
        loss = F.mse_loss(model(x)[:, 0], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                parts = zip(x_val.split(64), y_val.split(64))
                value = sum(F.mse_loss(model.module(x)[:, 0], y).item() for x, y in parts) / 4
            model.train()
            if rank == 0:
                print(f"step {step}: validation {value:.4f}", flush=True)
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
