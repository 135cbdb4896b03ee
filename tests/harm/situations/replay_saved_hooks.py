"""Losses that are NaN, or whose gradient is, where what autograd has saved comes from files that are read once.

parts: all
"""
import os

import torch
import torch.nn.functional as F
from _report import report, start
from torch import nn
from torch.utils.checkpoint import checkpoint

start()
os.makedirs(folder := "saved", exist_ok=True)
counts = {"packed": 0, "unpacked": 0, "computed": 0}


def pack(tensor):
    path = os.path.join(folder, str(counts["packed"]))
    counts["packed"] += 1
    torch.save(tensor.detach(), path)
    return path


def unpack(path):
    counts["unpacked"] += 1
    tensor = torch.load(path)
    os.remove(path)
    return tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.body(x)

    def loss(self, out, wanted):
        counts["computed"] += 1
        return F.mse_loss(F.dropout(self.norm(out), 0.3), wanted)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(10):
    x, wanted = torch.randn(8, 4), torch.randn(8, 6)
    if step in {3, 7}:
        wanted[0, 0] = float("nan")
    out = model(x)
    if step % 2:
        loss = checkpoint(model.loss, out, wanted, use_reentrant=False)
    else:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model.loss(out, wanted) + (out - out.detach()).square().sum().sqrt() * (step == 4)
    optimizer.zero_grad()
    loss.backward()
    finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
    print(step, finite, counts)
    if finite:
        optimizer.step()
report([model], [optimizer], files=sorted(os.listdir(folder)))
