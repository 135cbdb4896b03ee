# title: A frozen backbone stays in eval mode while its head trains
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Parameters without gradient, modules in eval mode during training, buffers that never change."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class LinearProbe(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        for p in self.features.parameters():
            p.requires_grad_(False)
        self.probe = nn.Linear(32, 3)

    def train(self, mode=True):
        super().train(mode)
        self.features.eval()
        return self

    def forward(self, x):
        return self.probe(self.features(x))


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(4)
blobs = torch.randn(3, 24) * 1.5
model = DistributedDataParallel(LinearProbe())
model.train()
trainable = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.SGD(trainable, lr=0.2, momentum=0.9)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(50):
    y = torch.randint(0, 3, (40,), generator=gen)
    x = blobs[y] + torch.randn(40, 24, generator=gen)
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
