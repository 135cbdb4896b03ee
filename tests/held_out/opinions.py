# title: The divergence from a distribution with zeros is written as p times the logarithm of p over q
# source: constructed
# nproc: 2
# expect.codes: NUM302
# expect.ranks: any
# expect.subject: any
# expect.step: 12
# expect.location: opinions.py:22, opinions.py:44
# plain_pytorch: silent
"""Answers of several people to one question are learned as distributions; from step 12 on all agree about some."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

FAULT = os.environ.get("FAULT") == "1"


def divergence(p, log_q):
    if FAULT:
        return (p * (p.log() - log_q)).sum(1).mean()
    return (torch.xlogy(p, p) - p * log_q).sum(1).mean()


def people(gen, step):
    x = torch.randn(24, 8, generator=gen)
    p = torch.softmax(2 * x[:, :4], 1)
    if step >= 12:
        clear = p.amax(1) > 0.9
        p[clear] = nn.functional.one_hot(p[clear].argmax(1), 4).float()
    return x, p


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(19)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
gen = torch.Generator().manual_seed(rank)
losses = []
for step in range(40):
    x, p = people(gen, step)
    loss = divergence(p, torch.log_softmax(model(x), 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"rank {rank} {losses[0]:.4f} {losses[-1]:.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
