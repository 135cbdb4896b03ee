# title: Gradients are clipped in the loop over micro-batches, and not once before the step
# source: https://github.com/huggingface/accelerate/blob/main/docs/source/usage_guides/gradient_accumulation.md
# nproc: 2
# expect.codes: RCP813
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Learns a pendulum's next state from four small windows a step; the sum of gradients is cut four times, or once."""

import contextlib
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
WINDOWS = 4


def swing(gen):
    angle, speed = torch.rand(24, 1, generator=gen) * 6 - 3, torch.randn(24, 1, generator=gen)
    faster = speed - 0.3 * torch.sin(angle)
    return torch.cat([angle, speed], 1), torch.cat([angle + 0.3 * faster, faster], 1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(31)
    model = DDP(nn.Sequential(nn.Linear(2, 64), nn.CELU(), nn.Linear(64, 64), nn.CELU(), nn.Linear(64, 2)))
    opt = torch.optim.RAdam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(610 + rank)
    curve = []
    for _ in range(50):
        for window in range(WINDOWS):
            last = window == WINDOWS - 1
            x, y = swing(gen)
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.mse_loss(model(x), y)
                (loss / WINDOWS).backward()
            if FAULT or last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        curve.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
