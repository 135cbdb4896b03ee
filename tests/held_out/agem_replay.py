# title: Gradients are projected by a reference gradient that each rank takes from its own memory of old samples
# source: constructed
# nproc: 2
# expect.codes: SYNC206, SYNC201
# expect.ranks: any
# expect.subject: any
# expect.step: 30
# expect.step_slack: 10
# plain_pytorch: silent
"""Two tasks one after the other; gradients of the second may not hurt the first (A-GEM)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FAULT = os.environ.get("FAULT") == "1"


def task(number, gen, n=32):
    x = torch.randn(n, 12, generator=gen)
    return x, (x[:, 4 * number] + x[:, 4 * number + 1] > 0).long()


def reference(net, memory, params):
    x, y = memory
    grads = torch.autograd.grad(F.cross_entropy(net(x), y), params)
    flat = torch.cat([g.flatten() for g in grads])
    if not FAULT:
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
    return flat


@torch.no_grad()
def project(params, ref):
    flat = torch.cat([p.grad.flatten() for p in params])
    dot = flat @ ref
    if dot < 0:
        flat -= dot / (ref @ ref) * ref
        for p, part in zip(params, flat.split([p.numel() for p in params])):
            p.grad.copy_(part.view_as(p))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(4)
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
ddp = nn.parallel.DistributedDataParallel(net)
params = list(net.parameters())
sgd = torch.optim.SGD(params, lr=0.1)
gen = torch.Generator().manual_seed(rank)
memory = task(0, gen, 48)
for step in range(80):
    now = 0 if step < 30 else 1
    x, y = task(now, gen)
    loss = F.cross_entropy(ddp(x), y)
    sgd.zero_grad()
    loss.backward()
    if now == 1:
        project(params, reference(net, memory, params))
    sgd.step()
print(f"rank {rank} {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
