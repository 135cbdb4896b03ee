# title: The learned weights of two losses are trained by the optimizer and belong to no wrapper
# source: constructed
# nproc: 2
# expect.codes: SYNC203
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""Depth and class of a pixel at once, weighed by learned uncertainties."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss

FAULT = os.environ.get("FAULT") == "1"


class Uncertainty(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(n))

    def forward(self, losses):
        return sum(torch.exp(-s) * loss + s for s, loss in zip(self.log_var, losses))


class Pixels(nn.Module):
    def __init__(self, weigh=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 48), nn.ReLU())
        self.depth, self.kind = nn.Linear(48, 1), nn.Linear(48, 4)
        self.weigh = weigh

    def forward(self, x, depth, kind):
        h = self.body(x)
        losses = l1_loss(self.depth(h)[:, 0], depth), cross_entropy(self.kind(h), kind)
        return losses if self.weigh is None else self.weigh(losses)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
weigh = Uncertainty(2)
model = nn.parallel.DistributedDataParallel(Pixels(None if FAULT else weigh))
parameters = [*model.parameters(), *weigh.parameters()] if FAULT else model.parameters()
optimizer = torch.optim.Adam(parameters, lr=5e-3)
gen = torch.Generator().manual_seed(rank)
for step in range(70):
    x = torch.randn(40, 9, generator=gen)
    depth, kind = x[:, 0] * (1 + rank) + x[:, 1], x[:, 5:].argmax(1)
    loss = model(x, depth, kind)
    if FAULT:
        loss = weigh(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(rank, loss.item(), weigh.log_var.tolist(), flush=True)
dist.barrier()
dist.destroy_process_group()
