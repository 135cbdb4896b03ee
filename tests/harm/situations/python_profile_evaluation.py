"""Profilers of the script around evaluations with active dropout.

parts: all
"""

import cProfile
import pstats
import sys

import torch
from _report import batches, ddp, digest, finish, report, start
from torch import nn
from torch.nn import functional as F

calls = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.late = nn.Linear(16, 8), nn.Linear(8, 4), False

    def forward(self, x):
        x = F.dropout(self.one(x), 0.3)
        if self.late:
            sys.setprofile(count)  # a profiler that starts in the middle of a forward
        return self.two(x)


def count(frame, event, arg):
    if frame.f_code.co_filename == __file__ and event == "call":
        calls.append(frame.f_code.co_name)


def evaluate():
    model.eval()
    with torch.no_grad():
        values = [model(x) for x in batches(3, seed=7)]
    model.train()
    return values


start()
inner = Net()
model = ddp(inner)
optimizer = torch.optim.SGD(inner.parameters(), 1e-2)
losses, found, mine, seen = [], [], [], []
for epoch in range(4):
    for x in batches(5):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if epoch == 1:
        profile = cProfile.Profile()
        found.append(digest(profile.runcall(evaluate)))
        stats = pstats.Stats(profile).stats
        seen.append(sorted((name, n) for (file, _, name), (n, *_) in stats.items() if file == __file__))
        continue
    inner.late = epoch == 0
    if epoch == 2:
        sys.setprofile(count)
    found.append(digest(evaluate()))
    inner.late = False
    mine.append(sys.getprofile() is count)
    sys.setprofile(None)
report([inner], [optimizer], losses, found=found, mine=mine, seen=seen, calls=calls)
del model
finish()
