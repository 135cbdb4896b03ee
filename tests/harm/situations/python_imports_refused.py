"""After its first steps the script refuses all imports."""

import builtins
import sys

import torch
from _report import batches, report, start, train
from torch import nn

asked = set()


class Refuses:
    def find_spec(self, name, path=None, target=None):
        asked.add(name)
        raise ImportError(f"no further modules: {name}")


real = builtins.__import__


def imports(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and name not in sys.modules:
        asked.add(f"import {name}")
        raise ImportError(f"no further modules: {name}")
    return real(name, globals, locals, fromlist, level)


start()
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
sys.meta_path.insert(0, Refuses())
builtins.__import__ = imports
data = list(batches(60))
data[40][0, 0] = float("nan")
for x in data:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0)
    optimizer.step()
    losses.append(loss.detach())
builtins.__import__ = real
del sys.meta_path[0]
report([model], [optimizer], losses, asked=sorted(asked))
