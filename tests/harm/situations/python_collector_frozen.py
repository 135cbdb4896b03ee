"""The collector is frozen, off, set to keep garbage."""

import gc

import torch
from _report import batches, report, start, train
from torch import nn


class Cycle:
    def __init__(self):
        self.me = self


start()
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
gc.collect()
gc.freeze()
gc.disable()
gc.set_threshold(50, 3, 3)
for _ in range(5):
    Cycle()
    losses += train(model, optimizer, batches(10))
states = [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0]
gc.set_debug(gc.DEBUG_SAVEALL)
gc.collect()
kept = sum(type(one) is Cycle for one in gc.garbage)
tensors = sum(isinstance(one, torch.Tensor) for one in gc.garbage)
gc.set_debug(0)
gc.garbage.clear()
gc.unfreeze()
gc.enable()
losses += train(model, optimizer, batches(20))
report([model], [optimizer], losses, states=states, kept=kept, tensors=tensors, frozen=gc.get_freeze_count())
