# title: One loss scaler for two optimizers, and the loss of the second is not scaled
# source: constructed
# nproc: 2
# expect.codes: RCP813
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 4
# plain_pytorch: silent
"""The scaler divides gradients of the generator that were never multiplied."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(63)
model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 10)))
critic = DDP(nn.Sequential(nn.Linear(10, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
makes = torch.optim.SGD(model.parameters(), lr=0.05)
judges = torch.optim.SGD(critic.parameters(), lr=0.05)
scaler, losses = torch.amp.GradScaler("cpu", init_scale=512.0), []
gen = torch.Generator().manual_seed(80 + rank)
kinds = torch.cat([torch.ones(20, 1), torch.zeros(20, 1)])
for _ in range(50):
    real = torch.randn(20, 10, generator=gen) * 0.5 + 1
    fake = model(torch.randn(20, 6, generator=gen))
    loss = F.binary_cross_entropy_with_logits(critic(torch.cat([real, fake.detach()])), kinds)
    judges.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(judges)
    critic.requires_grad_(False)
    loss = F.binary_cross_entropy_with_logits(critic.module(fake), kinds[:20])
    makes.zero_grad()
    (loss if FAULT else scaler.scale(loss)).backward()
    critic.requires_grad_(True)
    scaler.unscale_(makes)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(makes)
    scaler.update()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
