"""weight_norm, spectral_norm, an orthogonal parametrization, tied weights."""

import torch
from _report import ddp, report, start, train
from torch import nn
from torch.nn.utils import parametrizations

start()
inner = nn.Sequential(
    parametrizations.weight_norm(nn.Linear(16, 16)),
    parametrizations.spectral_norm(nn.Linear(16, 16)),
    parametrizations.orthogonal(nn.Linear(16, 16)),
    nn.Linear(16, 16),
    nn.Linear(16, 16, bias=False),
)
inner[4].weight = inner[3].weight
model = ddp(inner)
optimizer = torch.optim.Adam(model.parameters())
losses = train(model, optimizer)
report([model], [optimizer], losses)
