# title: Contrastive learning against a slow copy whose keys are gathered from all ranks without a gradient
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A gather under no_grad, a slow encoder outside the wrapper, a queue in a plain attribute."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Moco:
    def __init__(self, dim=16, size=192, temperature=0.3):
        torch.manual_seed(8)
        self.rank, self.world, self.t = dist.get_rank(), dist.get_world_size(), temperature
        net = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, dim))
        self.slow = copy.deepcopy(net).requires_grad_(False)
        self.fast = DistributedDataParallel(net)
        self.queue = F.normalize(torch.randn(size, dim), dim=1)
        self.at = 0

    @torch.no_grad()
    def keys(self, x):
        for s, f in zip(self.slow.parameters(), self.fast.module.parameters()):
            s.lerp_(f, 0.05)
        return F.normalize(self.slow(x), dim=1)

    @torch.no_grad()
    def remember(self, k):
        parts = [torch.empty_like(k) for _ in range(self.world)]
        dist.all_gather(parts, k)
        k = torch.cat(parts)
        self.queue[self.at : self.at + len(k)] = k
        self.at = (self.at + len(k)) % len(self.queue)

    def loss(self, a, b):
        q, k = F.normalize(self.fast(a), dim=1), self.keys(b)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / self.t
        self.remember(k)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


dist.init_process_group("gloo")
moco = Moco()
optimizer = torch.optim.SGD(moco.fast.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
gen = torch.Generator().manual_seed(moco.rank)
for step in range(70):
    x = torch.randn(24, 24, generator=gen)
    loss = moco.loss(x + 0.3 * torch.randn(x.shape, generator=gen), x + 0.3 * torch.randn(x.shape, generator=gen))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {moco.rank} {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
