# title: Training resumes from a checkpoint in which one convolution is already NaN
# source: constructed
# nproc: 3
# expect.codes: NUM304
# expect.ranks: all
# expect.subject: backbone.1.weight
# expect.step: 0
# plain_pytorch: silent
"""The file is loaded on every rank before wrapping; a few channels of one convolution are NaN in it."""
import os
import tempfile
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Stripes(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.backbone = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.head = nn.Linear(48, 3)

    def forward(self, image):
        return self.head(self.backbone(self.stem(image)).flatten(1))


def yesterday(path):
    """What an earlier run left behind."""
    state = Stripes().state_dict()
    if FAULT:
        state["backbone.1.weight"][3:5] = float("nan")
    torch.save(state, path)


def images(gen, n=32):
    kind = torch.randint(0, 3, (n,), generator=gen)
    t = torch.arange(10.0)
    wave = torch.sin(1.5 * t)
    patterns = torch.stack([wave[:, None].expand(10, 10), wave[None, :].expand(10, 10), torch.sin(t[:, None] + t)])
    return patterns[kind][:, None] + 0.3 * torch.randn(n, 1, 10, 10, generator=gen), kind


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(4)
with tempfile.TemporaryDirectory() as folder:
    yesterday(f"{folder}/last.pt")
    net = Stripes()
    net.load_state_dict(torch.load(f"{folder}/last.pt", weights_only=True))
ddp = DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
gen = torch.Generator().manual_seed(90 + rank)
losses = []
for _ in range(40):
    image, kind = images(gen)
    loss = nn.functional.cross_entropy(ddp(image), kind)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
