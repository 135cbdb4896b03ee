"""A batch in the mkldnn layout."""

import torch
from _report import batches, ddp, report, start, train
from torch import nn


class Dense(nn.Module):
    def forward(self, x):
        return x.to_dense()


start()
model = ddp(nn.Sequential(Dense(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer, [x.to_mkldnn() for x in batches()])
report([model], [optimizer], losses)
