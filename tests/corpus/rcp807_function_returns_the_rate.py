# title: The function of LambdaLR returns the learning rate and not a factor of it, so that the rate is squared
# source: https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.LambdaLR.html
# nproc: 2
# expect.codes: RCP807
# expect.ranks: all
# expect.step: 8
# plain_pytorch: silent
"""A regression of a sum of waves with a warm-up and a linear decay."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT") == "1"
PEAK, WARM, STEPS = 5e-3, 8, 60


def factor(step):
    share = (step + 1) / WARM if step < WARM else 1 - (step - WARM) / (STEPS - WARM)
    return PEAK * share if FAULT else share


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(91)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 48), nn.GELU(), nn.Linear(48, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    generator = torch.Generator().manual_seed(410 + rank)
    losses = []
    for _ in range(STEPS):
        places = torch.randn(64, 6, generator=generator)
        loss = nn.functional.mse_loss(model(places), places.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
