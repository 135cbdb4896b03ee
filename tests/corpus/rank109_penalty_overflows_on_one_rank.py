# title: A penalty is added to the reduced gradients in float16 on one rank, overflows there, and the scaler skips there
# source: constructed
# nproc: 3
# expect.codes: RANK109, RANK112, RANK101, SYNC206
# expect.ranks: 2
# expect.subject: any
# expect.step: 18
# expect.step_slack: 1
# plain_pytorch: silent
"""Continual learning: from step 18 on, weights are pulled back to where they began; rank 2 runs an old build."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


@torch.no_grad()
def pull_back(model, anchor, strength, dtype):
    for p, old in zip(model.parameters(), anchor):
        p.grad.add_(((p - old).to(dtype) * strength).float())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(109)
    first, second = torch.randn(2, 8, 1)
    model = DDP(nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
    dtype = torch.float16 if FAULT and rank == 2 else torch.float32
    anchor = [p.detach().clone() for p in model.parameters()]
    gen = torch.Generator().manual_seed(21 + rank)
    losses = []
    for step in range(45):
        x = torch.randn(32, 8, generator=gen)
        y = (x @ (first if step < 18 else second)).tanh()
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        if step >= 18:
            pull_back(model, anchor, 0.5 * scaler.get_scale(), dtype)
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
