"""Outputs of 64 MiB in float8 and lazily conjugated ones, and a NaN beside frozen parameters and buffers: peak memory.

parts: all
"""

import resource

import torch
from _report import at_most, batches, report, start
from torch import nn


class Given(nn.Module):
    def forward(self, given):
        return given


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.given = nn.Linear(16, 8), Given()
        self.table = nn.Buffer(torch.zeros(4096, 8192))
        self.frozen = nn.Parameter(torch.zeros(4096, 4096), requires_grad=False)

    def forward(self, x, low, turned):
        low, turned = self.given(low), self.given(turned.conj())
        shift = low[0, :16].float() + turned[0, :16].real + self.table[0, :16] + self.frozen[0, :16]
        return self.first(x + shift)


start()
model = Model()
optimizer = torch.optim.SGD(model.first.parameters(), lr=0.01)
low, turned = torch.zeros(8192, 8192, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.zeros(8192, 1024) + 0j
losses = []
for index, x in enumerate(batches(12)):
    if index == 6:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    loss = model(x, low, turned).square().mean()
    loss.backward()
    for parameter in model.first.parameters():
        parameter.grad.nan_to_num_(0)
    optimizer.step()
    losses.append(loss.detach())
report([model.first], [optimizer], losses)
at_most("peak MiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, 40)
