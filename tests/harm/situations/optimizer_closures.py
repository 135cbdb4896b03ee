"""LBFGS, a closure for SGD that counts its calls, what step returns."""

import torch
from _report import batches, ddp, report, start
from torch import nn

start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)))
first = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
second = torch.optim.SGD(model.parameters(), 0.1)
losses, calls = [], [0]
for optimizer in (first, second):
    for x in batches():

        def closure():
            calls[0] += 1
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
report([model], [first, second], losses, calls=calls)
