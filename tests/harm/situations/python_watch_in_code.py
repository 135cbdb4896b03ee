"""ddpdebug.watch and its end in the script: what inspect and pickle show."""

import inspect
import pickle
import sys

import torch
from _report import batches, report, start, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x, mask=None):
        return self.layer(x if mask is None else x * mask)


def said():
    functions = Net.forward, torch.autograd.backward, nn.Module.__call__, torch.optim.Optimizer.load_state_dict
    return [(inspect.getfullargspec(one), one.__globals__["__name__"], sorted(vars(one))) for one in functions]


start()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.05)
losses = train(model, optimizer)
first, kept = said(), (torch.autograd.backward, nn.Module.__call__, vars(Net)["forward"])
attach = sys.modules.get("ddpdebug.monitor.attach")
monitor = attach.watch(model, optimizer) if attach is not None and attach.current() is not None else None
losses += train(model, optimizer, batches(count=9))
during = said()
if monitor is not None:
    monitor.close()
losses += train(pickle.loads(pickle.dumps(model)), optimizer, batches(count=3))
losses += train(model, optimizer, batches(count=3))
after = said()
same = [a is b for a, b in zip(kept, (torch.autograd.backward, nn.Module.__call__, vars(Net)["forward"]), strict=True)]
report([model], [optimizer], losses, first=first, same=same, during=during == first, after=after == first)
