# title: Features are rounded to integers in the middle of the model, so nothing before it gets a gradient
# source: constructed
# nproc: 2
# expect.codes: HLTH714
# expect.ranks: all
# expect.subject: encoder
# expect.step: 0
# expect.step_slack: 4
# plain_pytorch: silent
"""Compression of sensor curves to small integers; the straight-through estimator is missing."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Compressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 24))

    def forward(self, curve):
        code = 4 * self.encoder(curve)
        code = code.round() if FAULT else code + (code.round() - code).detach()
        return self.decoder(code / 4)


def curves(gen, n=48):
    phase = 6.2832 * torch.rand(n, 1, generator=gen)
    return torch.sin(phase + torch.arange(24.0) / 3)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(Compressor())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        curve = curves(gen)
        loss = F.mse_loss(model(curve), curve)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
