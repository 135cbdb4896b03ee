# title: A GradScaler that starts too high skips its first steps, on all ranks together
# source: https://github.com/pytorch/pytorch/issues/90057
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Gradients overflow a few times until the scale fits half precision."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel


def step(model, opt, scaler, x, y):
    opt.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(27)
    means = torch.randn(4, 14)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(14, 48), nn.ReLU(), nn.Linear(48, 4)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**26, growth_interval=500)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(70):
        y = torch.randint(0, 4, (40,), generator=gen)
        losses.append(step(model, opt, scaler, means[y] + 0.8 * torch.randn(40, 14, generator=gen), y))
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} "
          f"scale={scaler.get_scale():.0f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
