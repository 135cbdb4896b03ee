# title: The weights of experts are a softmax over the samples of the batch, not over the experts
# source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.softmax.html
# nproc: 2
# options: --every-step
# expect.codes: RCP825
# expect.ranks: all
# expect.step: 3
# expect.step_slack: 2
# expect.location: rcp825_softmax_over_batch.py:35
# plain_pytorch: silent
"""Four small experts and a gate predict the flow through a valve."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class Valve(nn.Module):
    def __init__(self, width=20, experts=4):
        super().__init__()
        self.gate = nn.Linear(6, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1)) for _ in range(experts))

    def forward(self, state):
        weights = F.softmax(self.gate(state), dim=0 if FAULT else -1)
        flows = torch.cat([expert(state) for expert in self.experts], -1)
        return (weights * flows).sum(-1)


torch.manual_seed(4)
model = DDP(Valve())
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
gen = torch.Generator().manual_seed(30 + rank)
losses = []
for step in range(80):
    state = torch.randn(28, 6, generator=gen)
    flow = state[:, 0] * state[:, 1].sigmoid() + state[:, 2]
    loss = F.mse_loss(model(state), flow)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    time.sleep(0.002)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} loss={sum(losses[-10:]) / 10:.4f} crc={crc:08x}", flush=True)
dist.destroy_process_group()
