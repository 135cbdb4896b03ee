# title: A branch of the model is built but never called, and find_unused_parameters keeps that quiet
# source: constructed
# nproc: 3
# expect.codes: SYNC207, RCP811, HLTH714
# expect.ranks: all
# expect.subject: skip_path
# expect.step: 0
# expect.step_slack: 20
# plain_pytorch: silent
"""The ranks stay in sync; the skip path is in the optimizer and never learns."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class WideAndDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep_path = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 1))
        self.skip_path = nn.Linear(12, 1)

    def forward(self, x):
        if FAULT:
            return self.deep_path(x)
        return self.deep_path(x) + self.skip_path(x)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(73)
w = torch.randn(12, 1) / 3
ddp = DDP(WideAndDeep(), find_unused_parameters=FAULT)
opt = torch.optim.AdamW(ddp.parameters(), lr=4e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(60):
    x = torch.randn(32, 12, generator=gen)
    loss = nn.functional.mse_loss(ddp(x), x @ w + (x[:, :1] * x[:, 1:2]).tanh())
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
