# title: Gradients are clipped at a threshold far below their ordinary norm, so every step has the same length
# source: constructed
# nproc: 2
# expect.codes: HLTH707
# expect.ranks: all
# expect.subject: any
# expect.step: 16
# expect.step_slack: 30
# plain_pytorch: silent
"""House prices in thousands from eight features, clipping copied from a language model."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def houses(gen, n=64):
    features = torch.randn(n, 8, generator=gen)
    price = 20 + features @ torch.arange(1.0, 9.0) + torch.randn(n, generator=gen)
    return features, price


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(70):
        features, price = houses(gen)
        loss = F.mse_loss(model(features)[:, 0], price)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25 if FAULT else 1000.0)
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
