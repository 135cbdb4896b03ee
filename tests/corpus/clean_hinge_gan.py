# title: A GAN with two DDP models, gradients switched off in turn
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A GAN with two DDP models, gradients switched off in turn."""

import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def grads(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)))
    disc = DDP(nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    g_opt = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9))
    d_opt = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.5, 0.9))
    gen, losses = torch.Generator().manual_seed(100 + rank), []
    for step in range(50):
        a = 6.28 * torch.rand(64, generator=gen)
        real = torch.stack([a.cos(), a.sin()], 1)
        for _ in range(2):
            fake = model(torch.randn(64, 4, generator=gen)).detach()
            d = disc(torch.cat([real, fake]))
            d_loss = F.relu(1 - d[:64]).mean() + F.relu(1 + d[64:]).mean()
            d_opt.zero_grad()
            d_loss.backward()
            d_opt.step()
        grads(disc.module, False)
        g_loss = -disc.module(model(torch.randn(64, 4, generator=gen))).mean()
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        grads(disc.module, True)
        losses.append(g_loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
