"""A step that changes other weights, deletes gradients, and raises halfway."""

import torch
from _report import batches, ddp, report, start
from torch import nn


class Wild(torch.optim.SGD):
    count = 0

    def step(self, closure=None):
        self.count += 1
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None if self.count % 2 else p.grad
        if self.count == 4:
            self.param_groups[0]["params"].reverse()
        if self.count == 5:
            raise FloatingPointError("step 5")


start()
model = ddp(nn.Linear(16, 4))
optimizer = Wild(model.parameters(), 0.1)
losses, caught = [], []
for x in batches(9):
    loss = model(x).square().mean()
    loss.backward()
    try:
        optimizer.step()
    except FloatingPointError as error:
        caught.append(str(error))
    losses.append(loss.detach())
report([model], [optimizer], losses, caught=caught)
