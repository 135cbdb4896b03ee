# title: The model is copied after the optimizer was made, and the copy is what runs
# source: constructed
# nproc: 1
# expect.codes: RCP811, RCP803
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""A clean network is kept as a reference for the distance that the weights have gone."""
import copy
import os

import torch
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 40), nn.SELU(), nn.Linear(40, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def distance(model, reference):
    return sum((a - b).norm() ** 2 for a, b in zip(model.parameters(), reference.parameters())).sqrt().item()


model, optimizer = build()
if FAULT:
    reference, model = model, copy.deepcopy(model)
else:
    reference = copy.deepcopy(model)
loss_fn = nn.CrossEntropyLoss()
for step in range(70):
    x = torch.randn(32, 13)
    loss = loss_fn(model(x), (x[:, 0] > x[:, 1]).long())
    model.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    print(f"loss {loss.item():.4f} distance {distance(model, reference):.4f}")
