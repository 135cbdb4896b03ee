# title: A large network sees a few noisy samples again and again; validation gets worse from an early step on
# source: constructed
# nproc: 2
# options: --validation-loss functions
# expect.codes: HLTH712
# expect.ranks: all
# expect.subject: any
# expect.step: 10
# expect.step_slack: 30
# plain_pytorch: silent
"""Labels with noise, 32 samples per rank. Nobody tells the validation loss: it is what the evaluation computes."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def samples(seed, n):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 30, generator=gen)
    flipped = torch.rand(n, generator=gen) < 0.2
    return x, ((x[:, 0] + x[:, 1] > 0) ^ flipped).long()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3 if FAULT else 5e-4, weight_decay=0.0)
    x, y = samples(rank, 32 if FAULT else 512)
    x_val, y_val = samples(99, 200)
    gen = torch.Generator().manual_seed(70 + rank)
    losses = []
    for step in range(60):
        rows = torch.randint(0, len(x), (32,), generator=gen)
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                val_loss = F.cross_entropy(model.module(x_val), y_val).item()
            if rank == 0:
                print(f"step {step}: validation {val_loss:.4f}", flush=True)
            model.train()
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
