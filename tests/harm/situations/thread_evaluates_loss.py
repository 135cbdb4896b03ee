"""A thread evaluates with global hooks while the main thread trains.

parts: all
"""

import copy
import threading

import torch
from _report import batches, digest, report, start, train
from torch import nn


def evaluate(net, seed):
    with torch.no_grad():
        return [criterion(net(x), x[:, :4]) for x in batches(20, seed=seed)]


def apart():
    for seed in range(20):
        values.extend(evaluate(frozen, seed))


start()
model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
losses = train(model, optimizer)
frozen, values, mine = copy.deepcopy(model).eval(), [], []
thread = threading.Thread(target=apart)
handle = nn.modules.module.register_module_forward_hook(
    lambda module, args, output: mine.append(type(module).__name__) if threading.current_thread() is thread else None
)
thread.start()
for seed in range(6):
    losses += train(model, optimizer, batches(10))
    model.eval()
    losses += evaluate(model, seed)
    model.train()
thread.join()
handle.remove()
report([model, frozen], [optimizer], losses, values=digest(values), mine=digest(mine))
