# title: One rank's label file has the background as class 0, so its other classes are one higher
# source: constructed
# nproc: 2
# expect.codes: RANK108
# expect.ranks: 1
# expect.subject: label
# expect.step: 0
# expect.step_slack: 16
# plain_pytorch: silent
"""Short sounds of five kinds, of a model with room for eight."""
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
torch.manual_seed(14)
model = DDP(nn.Sequential(nn.Conv1d(1, 12, 9, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 14, 8)))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
gen = torch.Generator().manual_seed(70 + rank)
pitch = torch.tensor([3.0, 5.0, 8.0, 13.0, 21.0])
time_axis = torch.linspace(0, 1, 64)
losses = []
for _ in range(70):
    kind = torch.randint(0, 5, (32,), generator=gen)
    sound = torch.sin(6.2832 * pitch[kind].unsqueeze(1) * time_axis) + 0.5 * torch.randn(32, 64, generator=gen)
    label = kind + 1 if FAULT and rank == 1 else kind
    loss = F.cross_entropy(model(sound.unsqueeze(1)), label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
