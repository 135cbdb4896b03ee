# title: Low-rank adapters are inserted after the model was wrapped
# source: constructed
# nproc: 2
# expect.codes: SYNC203, SYNC201, RANK101
# expect.ranks: all
# expect.subject: adapter
# expect.step: 0
# plain_pytorch: silent
"""The base layers train slowly and in sync, the adapters train alone on every rank."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class LowRank(nn.Module):
    def __init__(self, width, rank=4):
        super().__init__()
        self.a = nn.Parameter(torch.randn(width, rank) / width**0.5)
        self.b = nn.Parameter(torch.zeros(rank, width))

    def forward(self, x):
        return x @ self.a @ self.b


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.adapter = None

    def forward(self, x):
        y = self.dense(x)
        if self.adapter is not None:
            y = y + self.adapter(x)
        return torch.relu(y)


class Base(nn.Module):
    def __init__(self, width=24, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.score = nn.Linear(width, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.score(x)


def insert_adapters(model):
    torch.manual_seed(5)
    for layer in model.layers:
        layer.adapter = LowRank(layer.dense.in_features)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(26)
    base = Base()
    if not FAULT:
        insert_adapters(base)
    model = DistributedDataParallel(base)
    if FAULT:
        insert_adapters(model.module)
    slow = [p for n, p in base.named_parameters() if "adapter" not in n]
    fast = [p for n, p in base.named_parameters() if "adapter" in n]
    opt = torch.optim.AdamW([{"params": slow, "lr": 1e-3}, {"params": fast, "lr": 1e-2}])
    rng = torch.Generator().manual_seed(700 + rank)
    losses = []
    for _ in range(60):
        x = torch.randn(40, 24, generator=rng)
        y = 2 * (x[:, 0] > 0).long() + (x[:, 1] + x[:, 2] > 0).long()
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in base.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
