# title: The schedule returns the step instead of its share of the warmup, and the learning rate explodes
# source: constructed
# nproc: 2
# expect.codes: NUM302, NUM301
# expect.ranks: all
# expect.subject: any
# expect.op: pow
# expect.location: num302_learning_rate_without_warmup_division.py:47
# expect.step: 16
# expect.step_slack: 2
# plain_pytorch: silent
"""Fields of a toy physics; weights grow from step to step until a number leaves float32."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
WARMUP = 20


def warmup(step):
    return float(step + 1) if FAULT else min(1.0, (step + 1) / WARMUP)


def waves(gen, n=64):
    x = 2 * torch.rand(n, 3, generator=gen) - 1
    return x, torch.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(50)
    model = DDP(nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.15)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, warmup)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        x, y = waves(gen)
        loss = (model(x) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
