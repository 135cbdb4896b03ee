# title: the auxiliary classifier is computed but its loss is left out, hidden by find_unused_parameters
# source: https://github.com/pytorch/pytorch/pull/61753
# nproc: 2
# expect.codes: SYNC207
# expect.ranks: all
# expect.subject: aux
# expect.step: 0
# expect.step_slack: 4
# plain_pytorch: silent
"""A small Inception-like net with deep supervision."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Branchy(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.aux = nn.Linear(8, 3)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        x = self.stem(x)
        aux = self.aux(x.mean((2, 3)))
        x = torch.cat([self.left(x), self.right(x)], 1).relu()
        return {"out": self.fc(x.mean((2, 3))), "aux": aux}


def criterion(outputs, target):
    losses = {k: nn.functional.cross_entropy(v, target) for k, v in outputs.items()}
    if FAULT or len(losses) == 1:
        return losses["out"]
    return losses["out"] + 0.4 * losses["aux"]


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(77)
model = DDP(Branchy(), find_unused_parameters=True)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
gen, losses = torch.Generator().manual_seed(rank), []
for _step in range(60):
    target = torch.randint(0, 3, (32,), generator=gen)
    x = 0.5 * torch.randn(32, 1, 10, 10, generator=gen)
    x += torch.stack([torch.eye(10), torch.eye(10).flip(0), torch.ones(10, 10) / 3])[target][:, None]
    loss = criterion(model(x), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
