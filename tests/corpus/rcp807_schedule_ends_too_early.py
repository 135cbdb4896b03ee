# title: The schedule ends at zero after a quarter of the run
# source: constructed
# nproc: 2
# expect.codes: RCP807
# expect.ranks: all
# expect.subject: any
# expect.step: 21
# expect.step_slack: 1
# plain_pytorch: silent
"""Linear decay; the fault counts the steps of one epoch instead of all four."""
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
EPOCHS, PER_EPOCH = 4, 20
torch.manual_seed(15)
model = DDP(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3)))
opt = torch.optim.SGD(model.parameters(), lr=0.3)
total = PER_EPOCH if FAULT else EPOCHS * PER_EPOCH
decay = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: max(0.0, 1 - n / total))
gen = torch.Generator().manual_seed(60 + rank)
mean = torch.randn(3, 12, generator=torch.Generator().manual_seed(7))
losses = []
for epoch in range(EPOCHS):
    for _ in range(PER_EPOCH):
        y = torch.randint(0, 3, (16,), generator=gen)
        x = mean[y] + 1.5 * torch.randn(16, 12, generator=gen)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        decay.step()
        losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
