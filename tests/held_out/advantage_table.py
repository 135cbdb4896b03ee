# title: Returns of shape (N,) minus values of shape (N, 1) make a table, of which the mean is taken
# source: constructed
# nproc: 1
# expect.codes: RCP819
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Value of positions in a game of sticks; the error is written by hand."""
import os

import torch
import torch.nn as nn

FAULT = os.environ.get("FAULT") == "1"


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, position):
        return self.net(position)


def games(n=64):
    position = torch.randn(n, 5)
    returns = torch.tanh(position[:, 0] * 2 - position[:, 1]) + 0.2 * torch.randn(n)
    return position, returns


def value_loss(values, returns, clip=3.0):
    error = returns - (values if FAULT else values.squeeze(-1))
    return error.clamp(-clip, clip).pow(2).mul(0.5).mean()


torch.manual_seed(1)
critic = Value()
optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
for update in range(80):
    position, returns = games()
    loss = value_loss(critic(position), returns)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.4f}")
