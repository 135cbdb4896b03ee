# title: The group that should have no weight decay was given a rate of zero instead
# source: constructed
# nproc: 2
# expect.codes: HLTH713, RCP807
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Kinds of soil from spectra, weight decay for matrices only."""
import os

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


def parameter_groups(module):
    matrices = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim <= 1]
    no_decay = {"params": others, "lr": 0.0} if FAULT else {"params": others, "weight_decay": 0.0}
    return [{"params": matrices}, no_decay]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(16)
    net = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 6))
    rule = torch.randn(32, 6)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=2e-3, weight_decay=0.05)
    gen = torch.Generator().manual_seed(rank)
    for _ in range(70):
        spectrum = torch.randn(32, 32, generator=gen)
        loss = nn.functional.cross_entropy(model(spectrum), (spectrum @ rule).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
