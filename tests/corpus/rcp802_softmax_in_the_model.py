# title: The model ends with a softmax and its output goes into cross_entropy
# source: constructed
# nproc: 2
# expect.codes: RCP802
# expect.ranks: all
# expect.subject: NllLoss
# expect.step: 0
# plain_pytorch: silent
"""A small convolutional classifier of blobs; the fault keeps the softmax of the inference model."""
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


class ShapeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3), nn.ReLU())
        self.fc = nn.Linear(12 * 4, 3)
        self.normalise = nn.Softmax(dim=1) if FAULT else nn.Identity()

    def forward(self, image):
        return self.normalise(self.fc(F.adaptive_avg_pool2d(self.body(image), 2).flatten(1)))


def images(gen, n=20):
    kind = torch.randint(0, 3, (n,), generator=gen)
    axis = torch.linspace(-1, 1, 12)
    yy, xx = torch.meshgrid(axis, axis, indexing="ij")
    shapes = torch.stack([(xx**2 + yy**2 < 0.4).float(), (xx.abs() < 0.3).float(), (yy.abs() < 0.3).float()])
    return shapes[kind][:, None] + 0.3 * torch.randn(n, 1, 12, 12, generator=gen), kind


torch.manual_seed(2)
model = DDP(ShapeNet())
criterion = nn.CrossEntropyLoss()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
gen = torch.Generator().manual_seed(50 + rank)
losses = []
for _ in range(50):
    x, y = images(gen)
    loss = criterion(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
