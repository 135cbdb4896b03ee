"""A model of 3,000 parameters.

slow: yes
"""

import torch
from _report import batches, ddp, report, start, train
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3000)])

    def forward(self, x):
        return x[:, :2] * torch.stack(list(self.scales)).sum(0) / 3000


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer, batches(3))
report([model], [optimizer], losses)
