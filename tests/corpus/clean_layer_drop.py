# title: LayerDrop: each rank skips layers of its own choice, with find_unused_parameters
# source: constructed
# nproc: 3
# expect.codes: none
# plain_pytorch: silent
"""Now and then a layer has no gradient on one rank, or on all; DDP fills in zeros or leaves it out."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Encoder(nn.Module):
    def __init__(self, width=20, depth=4, drop=0.25):
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.out = nn.Linear(width, 1)
        self.drop = drop

    def forward(self, x):
        h = self.inp(x)
        for layer in self.layers:
            if self.training and torch.rand(()).item() < self.drop:
                continue
            h = h + layer(h)
        return self.out(h)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(77)
model = DistributedDataParallel(Encoder(), find_unused_parameters=True)
torch.manual_seed(7700 + rank)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for _ in range(60):
    x = torch.randn(40, 8)
    y = x[:, :1] - 0.5 * x[:, 1:2] + 0.5 * (x[:, 2:3] * x[:, 3:4]).tanh()
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
