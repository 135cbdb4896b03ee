# title: A frozen teacher runs in train mode, with dropout and batch statistics
# source: constructed
# nproc: 2
# expect.codes: RCP805
# expect.ranks: all
# expect.subject: 1
# expect.step: 0
# expect.step_slack: 5
# plain_pytorch: silent
"""requires_grad_(False) and no_grad() do not change the mode; the targets are noisy, and the statistics drift."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def net(width):
    return nn.Sequential(nn.Linear(14, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4))


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(33)
teacher = net(40).requires_grad_(False)
if not FAULT:
    teacher.eval()
model = DDP(nn.Sequential(nn.Linear(14, 20), nn.Tanh(), nn.Linear(20, 4)))
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=4e-3), []
torch.manual_seed(330 + rank)
gen = torch.Generator().manual_seed(40 + rank)
for step in range(30):
    x = torch.randn(24, 14, generator=gen)
    with torch.no_grad():
        soft = teacher(x).softmax(-1)
    loss = F.kl_div(model(x).log_softmax(-1), soft, reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
