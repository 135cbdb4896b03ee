"""Parameters empty, 0-dim, half, float64, expanded, unused; buffers bool, complex, sparse, None."""

import torch
from _report import batches, ddp, report, start, train
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.low = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(4, 4).t())
        self.register_parameter("nothing", None)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("phase", torch.ones(4, dtype=torch.complex64))
        self.register_buffer("hidden", torch.ones(4), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        out = self.linear(x) @ self.turned * self.scale * self.low * self.wide
        return torch.cat([out, self.empty.double()]) * self.mask


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer)
report([model], [optimizer], losses)
