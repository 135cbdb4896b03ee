# title: random Fourier features are a plain attribute drawn per rank, so DDP never broadcasts them and each rank computes another function
# source: https://github.com/jmclong/random-fourier-features-pytorch/pull/7
# nproc: 2
# expect.codes: RANK107
# expect.ranks: any
# expect.subject: 0.b
# expect.step: 0
# plain_pytorch: silent
"""An implicit image network."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class FourierEmbedding(nn.Module):
    def __init__(self, n, scale=3.0):
        super().__init__()
        b = torch.randn(2, n) * scale
        if FAULT:
            self.b = b
        else:
            self.register_buffer("b", b)

    def forward(self, xy):
        z = xy @ self.b
        return torch.cat([z.sin(), z.cos()], -1)


def image(xy):
    return torch.stack([torch.sin(4 * xy[:, 0]), torch.cos(5 * xy[:, 1]), (xy ** 2).sum(1) - 0.5], 1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234 + rank)
    net = nn.Sequential(FourierEmbedding(32), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 3))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _step in range(80):
        xy = torch.rand(128, 2, generator=gen) * 2 - 1
        loss = nn.functional.mse_loss(model(xy), image(xy))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
