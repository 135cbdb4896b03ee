# title: The head is replaced for the new task after the optimizer was built
# source: constructed
# nproc: 2
# expect.codes: RCP811
# expect.ranks: all
# expect.subject: head
# expect.step: 3
# plain_pytorch: silent
"""Transfer to a task with other classes; the fault builds the optimizer first."""
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


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(18, 36), nn.ReLU(), nn.Linear(36, 24), nn.ReLU())
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.trunk(x))


torch.manual_seed(18)
net = Net(classes=10)
if FAULT:
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
net.head = nn.Linear(24, 4)
if not FAULT:
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
model = DDP(net)
gen = torch.Generator().manual_seed(33 + rank)
middle = torch.randn(4, 18, generator=torch.Generator().manual_seed(9))
losses = []
for _ in range(50):
    y = torch.randint(0, 4, (24,), generator=gen)
    x = middle[y] + torch.randn(24, 18, generator=gen)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
