"""Depth of the stack below DDP; two ranks.

ranks: 2
"""

import sys

import torch
from _report import batches, ddp, finish, report, start, train
from torch import nn

seen = {}


def note(where):
    frames, frame = [], sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "<module>":
        frames.append((frame.f_code.co_name, frame.f_code.co_filename.rpartition("/")[2]))
        frame = frame.f_back
    seen.setdefault(where, set()).add(tuple(frames))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.cut = nn.Linear(16, 4), nn.Identity()

    def forward(self, x):
        note("forward")
        return self.cut(self.layer(x))


start()
inner = Net()
inner.cut.register_forward_pre_hook(lambda *_: note("hook"))
model = ddp(inner)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
losses = train(model, optimizer, batches(count=12))
with model.no_sync():
    losses += train(model, optimizer, batches(count=2))
model.eval()
with torch.no_grad():
    model(torch.ones(2, 16)), inner(torch.ones(2, 16))
report([model], [optimizer], losses)
for where, frames in seen.items():
    print(where, sorted(frames))
del model
finish()
