"""Two ranks whose numbers stop being numbers: input, activation, loss, gradient, reduction, parameter, loss scale."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
RANK = dist.get_rank()
GEN = torch.Generator().manual_seed(RANK)
torch.manual_seed(0)


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x.relu())


class Shifted(nn.Module):
    def forward(self, x):
        return torch.log(x + 100.0)


class Filled(nn.Module):
    def forward(self, x):
        return x.nan_to_num(0.0, 0.0, 0.0)


class Root(nn.Module):
    def forward(self, x):
        return (x - x.detach()).abs().sqrt() + x


def train(middle, bad, rate=1e-3, loss=lambda out: out.square().mean(), dtype=torch.float32):
    model = DDP(nn.Sequential(nn.Linear(8, 16), middle, nn.Linear(16, 4)).to(dtype))
    kind = torch.optim.SGD if dtype == torch.float16 else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=rate)
    for step in range(5):
        x = torch.randn(6, 8, generator=GEN).to(dtype)
        if step == 3:
            x = bad(x)
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()


def log_of_nothing(out):
    nothing = out.mean() - out.mean()
    return torch.log(nothing)


def root_of_nothing(out):
    nothing = out.mean() - out.mean().detach()
    return torch.sqrt(nothing)


def one_of_two(out):
    nothing = out.mean() - out.mean()
    if out.shape[0] > 100:
        return torch.log(nothing)
    return torch.log(nothing)


def brought(out):
    weight = torch.full((4,), float("inf"))
    return (out * weight).mean()


def scaled():
    model = DDP(nn.Linear(8, 4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8, generator=GEN)).square().sum() * 10.0
        scaler.scale(loss).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


train(nn.Sequential(Shifted(), Filled()), lambda x: x * 1e4)
train(nn.Tanh(), lambda x: x.index_fill(0, torch.tensor([1]), float("nan")))
train(Log(), lambda x: -x)
train(Root(), lambda x: x)
train(nn.Tanh(), lambda x: x, loss=root_of_nothing)
train(nn.Tanh(), lambda x: x, loss=log_of_nothing)
train(nn.Tanh(), lambda x: x, loss=one_of_two)
train(nn.Tanh(), lambda x: x, loss=brought)
train(nn.Tanh(), lambda x: torch.full_like(x, 4.5e4), dtype=torch.float16)
train(nn.Tanh(), lambda x: x, rate=float("inf"))
scaled()
if len(sys.argv) > 1:
    raise ValueError("as asked")
dist.destroy_process_group()
