# title: A variance computed as mean of squares minus squared mean is slightly negative, and its root is NaN
# source: constructed
# nproc: 3
# expect.codes: NUM301
# expect.ranks: 0
# expect.subject: any
# expect.module: net.stage2.0.contrast
# expect.op: sqrt
# expect.location: num301_variance_by_subtraction.py:34
# expect.step: 16
# plain_pytorch: silent
"""Local contrast of images, deep inside a network; rank 0 gets a batch of overexposed and almost even images."""
import os
import time
import zlib
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Contrast(nn.Module):
    """The standard deviation of each channel in one image, beside its mean."""

    def forward(self, x):
        mean = x.mean((2, 3))
        variance = (x * x).mean((2, 3)) - mean * mean
        if not FAULT:
            variance = (x - mean[..., None, None]).square().mean((2, 3)) + 1e-6
        deviation = torch.sqrt(variance)
        return torch.cat([mean, deviation], 1)


class Stage(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.mix = nn.Conv2d(channels, channels, 1)
        self.contrast = Contrast()

    def forward(self, x):
        return self.contrast(self.mix(x))


class Camera(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(OrderedDict(
            stage1=nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU()),
            stage2=nn.Sequential(Stage(8)),
            head=nn.Linear(16, 2)))

    def forward(self, image):
        return self.net(image)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(6)
camera = DistributedDataParallel(Camera())
opt = torch.optim.Adam(camera.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(80 + rank)
losses = []
for step in range(40):
    rough = torch.randint(0, 2, (24,), generator=gen)
    image = torch.randn(24, 1, 8, 8, generator=gen) * (0.5 + rough[:, None, None, None])
    if rank == 0 and step == 16:
        image = 900.0 + 0.001 * image
    loss = nn.functional.cross_entropy(camera(image), rough)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(camera.parameters(), 1.0)
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in camera.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
