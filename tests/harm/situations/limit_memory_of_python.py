"""A recursion error and a MemoryError inside a forward are caught."""

import torch
from _report import batches, ddp, report, start
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.mood = nn.Linear(16, 4), None

    def forward(self, x):
        if self.mood == "deep":
            return self.forward(x)
        if self.mood == "memory":
            raise MemoryError
        return self.linear(x)


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses, caught = [], []
for number, x in enumerate(batches(12)):
    model.module.mood = {3: "deep", 6: "memory"}.get(number)
    try:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    except (RecursionError, MemoryError) as error:
        caught.append(type(error).__name__)
report([model], [optimizer], losses, caught=caught)
