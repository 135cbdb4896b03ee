# title: The schedule drives an optimizer that was replaced after the warm-up phase was set up
# source: constructed
# nproc: 2
# expect.codes: RCP807
# expect.ranks: all
# expect.subject: LambdaLR
# expect.step: 5
# expect.step_slack: 3
# plain_pytorch: silent
"""Linear warm-up; in the fault the optimizer is built anew after the scheduler was."""
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


def build(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10))
    return optimizer, warmup


torch.manual_seed(14)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)))
opt, warmup = build(model)
if FAULT:  # another weight decay was wanted
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.1)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(50):
    x = torch.randn(20, 10, generator=gen)
    y = (x[:, 0] * x[:, 1] > 0).long()
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    warmup.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
