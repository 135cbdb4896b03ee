# title: of two parameter groups, with and without weight decay, only the first is clipped
# source: constructed
# nproc: 2
# expect.codes: RCP813
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 4
# plain_pytorch: silent
"""Biases and norms are in a group without weight decay, and keep their whole gradients."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(19)
gen, truth = torch.Generator().manual_seed(310 + rank), torch.randn(12, 3)
model = DDP(nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3)))
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
optimizer, losses = torch.optim.AdamW(groups, lr=3e-3), []
for step in range(24):
    x = torch.randn(16, 12, generator=gen)
    loss = nn.functional.mse_loss(model(x), (x @ truth).tanh())
    optimizer.zero_grad()
    loss.backward()
    if FAULT:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    else:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
