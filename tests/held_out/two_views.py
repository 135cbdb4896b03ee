# title: Embeddings of all ranks are gathered for the loss, and this rank's own stay the gathered copy
# source: constructed
# nproc: 2
# expect.codes: SYNC210
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.location: two_views.py:23
# plain_pytorch: silent
"""Contrastive learning of two noisy views with negatives from all ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FAULT = os.environ.get("FAULT") == "1"


def everywhere(z):
    parts = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z.contiguous())
    if not FAULT:
        parts[dist.get_rank()] = z
    return torch.cat(parts)


class Contrast(nn.Module):
    def __init__(self, temperature=0.2):
        super().__init__()
        self.temperature = temperature

    def forward(self, a, b):
        logits = a @ everywhere(b).T / self.temperature
        start = dist.get_rank() * len(a)
        return F.cross_entropy(logits, torch.arange(start, start + len(a)))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(33)
    kinds = torch.randn(200, 16)
    encoder = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 12)))
    contrast = Contrast()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(rank)
    for _ in range(60):
        x = kinds[torch.randperm(200, generator=gen)[:24]]
        views = torch.cat([x + 0.2 * torch.randn(x.shape, generator=gen) for _ in range(2)])
        a, b = F.normalize(encoder(views), dim=1).chunk(2)
        loss = contrast(a, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank} loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
