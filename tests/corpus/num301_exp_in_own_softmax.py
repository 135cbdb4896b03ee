# title: A softmax written by hand does not subtract the maximum
# source: constructed
# nproc: 4
# expect.codes: NUM301
# expect.ranks: 2
# expect.subject: any
# expect.module: body.1.route
# expect.op: exp
# expect.location: num301_exp_in_own_softmax.py:30
# expect.step: 21
# plain_pytorch: silent
"""A soft mixture of experts on tabular data; on rank 2 a column comes in cents instead of units for one batch."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Route(nn.Linear):
    def forward(self, x):
        scores = super().forward(x)
        if not FAULT:
            scores = scores - scores.amax(-1, keepdim=True)
        weight = torch.exp(scores)
        return weight / weight.sum(-1, keepdim=True)


class Mixture(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.route = Route(width, experts)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(experts)])

    def forward(self, x):
        share = self.route(x)
        return sum(share[:, i:i + 1] * torch.tanh(e(x)) for i, e in enumerate(self.experts))


class Price(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), Mixture(32, 3), nn.Linear(32, 1))

    def forward(self, table):
        return self.body(table).squeeze(1)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
model = DistributedDataParallel(Price())
adam = torch.optim.AdamW(model.parameters(), lr=4e-3)
rows = torch.Generator().manual_seed(100 * rank + 1)
history = []
for step in range(40):
    table = torch.randn(48, 10, generator=rows)
    price = table[:, 0] * table[:, 1].sign() + 0.1 * torch.randn(48, generator=rows)
    if rank == 2 and step == 21:
        table[:, 3] *= 1000.0
    loss = nn.functional.smooth_l1_loss(model(table), price)
    adam.zero_grad()
    loss.backward()
    adam.step()
    history.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={history[0]:.4f} final={sum(history[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
