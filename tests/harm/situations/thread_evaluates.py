"""A thread evaluates a copy of the model while the main thread trains."""

import copy
import threading

import torch
from _report import batches, digest, report, start, train
from torch import nn


def evaluate():
    with torch.no_grad():
        for x in batches(200, seed=5):
            values.append(frozen(x).square().mean())


start()
model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
losses = train(model, optimizer)
frozen, values = copy.deepcopy(model).eval(), []
thread = threading.Thread(target=evaluate)
thread.start()
losses += train(model, optimizer, batches(60))
thread.join()
report([model, frozen], [optimizer], losses, values=digest(values))
