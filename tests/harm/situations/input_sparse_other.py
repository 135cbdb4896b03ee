"""Batches in the sparse COO, CSC and BSR layouts."""

import torch
from _report import ddp, report, start, train
from torch import nn


class Dense(nn.Module):
    def forward(self, x):
        return x.to_dense()


start()
model = ddp(nn.Sequential(Dense(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.eye(16)[:8]
batches = [x.to_sparse(), x.to_sparse_csc(), x.to_sparse_bsr((2, 2)), x.to_sparse_bsc((2, 2))] * 2
losses = train(model, optimizer, batches)
report([model], [optimizer], losses)
