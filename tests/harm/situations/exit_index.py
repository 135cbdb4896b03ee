"""A label and an embedding index out of range: caught first, then the end."""

import torch
import torch.nn.functional as F
from _report import report, start
from torch import nn

start()
model = nn.Sequential(nn.Embedding(100, 8), nn.Flatten(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
losses = []
for number in range(30):
    index = torch.randint(100, (8, 4))
    labels = torch.randint(10, (8,))
    if number == 10:
        labels[3] = 10
    if number in {15, 25}:
        index[3, 2] = 100
    optimizer.zero_grad()
    try:
        loss = F.cross_entropy(model(index), labels)
    except IndexError as error:
        print(number, error)
        if number == 25:
            report([model], [optimizer], losses)
            raise
        continue
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
