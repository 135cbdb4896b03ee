# title: Eleven layers of tanh start with weights a quarter of their usual size, and the signal dies on its way
# source: constructed
# nproc: 1
# expect.codes: HLTH715, HLTH702
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""A deep net for the movements of a robot arm, initialised by hand."""
import os

import torch
import torch.nn as nn

GAIN = 0.25 * 5 / 3 if os.environ.get("FAULT") == "1" else 5 / 3


def mlp(sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        linear = nn.Linear(a, b)
        nn.init.xavier_normal_(linear.weight, gain=GAIN)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


torch.manual_seed(3)
net = mlp([4] + [32] * 10 + [2])
nn.init.xavier_normal_(net[-1].weight)
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
for step in range(150):
    angles = torch.rand(64, 4) * 2 - 1
    reach = torch.stack([angles.sum(1).cos(), angles.sum(1).sin()], 1)
    loss = nn.functional.mse_loss(net(angles), reach)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.4f}")
