"""Complex parameters and gradients."""

import torch
from _report import batches, report, start
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 4, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


start()
model = Model()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
losses = []
for x in batches():
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
report([model], [optimizer], losses)
