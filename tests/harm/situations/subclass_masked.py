"""MaskedTensor as batch and inside the model."""

import warnings

import torch
from _report import batches, ddp, report, start, train
from torch import nn
from torch.masked import masked_tensor

warnings.filterwarnings("ignore", message=".*MaskedTensors is in prototype.*")


class Fill(nn.Module):
    def forward(self, x):
        return x.to_tensor(0.0)


start()
model = ddp(nn.Sequential(nn.Identity(), Fill(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer, [masked_tensor(x, x > 0) for x in batches()])
report([model], [optimizer], losses)
