# title: A custom autograd function clamps in its forward and divides by the unclamped value in its backward
# source: constructed
# nproc: 2
# expect.codes: NUM303
# expect.ranks: all
# expect.subject: any
# expect.module: decode.1.inverse
# expect.op: div
# expect.location: num303_own_backward_forgets_the_clamp.py:35, num303_own_backward_forgets_the_clamp.py:41
# expect.step: 0
# plain_pytorch: silent
"""A safe reciprocal, used behind a gate that is exactly 0 for many units from the first step on."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class SafeReciprocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        safe = x.clamp_min(0.1)
        ctx.save_for_backward(x if FAULT else safe)
        return 1.0 / safe

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = torch.div(-grad, x * x)
        return slope if FAULT else slope * (x > 0.1)


class Inverse(nn.Module):
    def forward(self, x):
        return SafeReciprocal.apply(x)


class Ratio(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.inverse = Inverse()

    def forward(self, x):
        below = self.down(x)
        return self.up(x) * self.inverse(below * (below > 0))


class Curve(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encode = nn.Linear(5, width)
        self.decode = nn.Sequential(nn.Tanh(), Ratio(width), nn.Linear(width, 1))

    def forward(self, x):
        return self.decode(self.encode(x))


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(91)
model = DDP(Curve(20))
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(40):
    x = torch.rand(64, 5, generator=gen)
    y = x[:, :1] / (0.5 + x[:, 1:2])
    loss = (model(x) - y).square().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
