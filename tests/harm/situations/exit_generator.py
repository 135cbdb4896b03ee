"""A generator that trains is dropped halfway: GeneratorExit reaches its `finally`."""

import torch
from _report import batches, report, start
from torch import nn


def training():
    try:
        for x in batches(50):
            with torch.enable_grad():
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()
    finally:
        print("closed")


start()
model = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
steps = training()
losses = [next(steps) for _ in range(5)]
steps.close()
left = training()
losses.append(next(left))
report([model], [optimizer], losses)
