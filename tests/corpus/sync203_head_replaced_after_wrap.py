# title: The classifier head is replaced for a new label set after wrapping
# source: https://github.com/pytorch/pytorch/issues/12603
# nproc: 3
# expect.codes: SYNC203, SYNC201, RANK101
# expect.ranks: all
# expect.subject: head
# expect.step: 25
# plain_pytorch: silent
"""find_unused_parameters hides that the old head is gone; the new one is in the optimizer but in no bucket."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Species(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(15, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU())
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.features(x))


def new_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=5e-3)


def observations(gen, means, classes):
    y = torch.randint(0, classes, (36,), generator=gen)
    return means[y] + 0.8 * torch.randn(36, 15, generator=gen), y


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(66)
means = torch.randn(6, 15)
net = Species(classes=4)
ddp = DDP(net, find_unused_parameters=True)
opt = new_optimizer(net)
gen = torch.Generator().manual_seed(rank)
losses, classes = [], 4
for step in range(60):
    if step == 25:
        classes = 6
        torch.manual_seed(67)
        net.head = nn.Linear(24, classes)
        if not FAULT:
            ddp = DDP(net, find_unused_parameters=True)
        opt = new_optimizer(net)
    x, y = observations(gen, means, classes)
    loss = nn.functional.cross_entropy(ddp(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
