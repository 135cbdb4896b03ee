"""A model whose output is sparse, with a buffer that is, and a loss that adds a sparse tensor up.

parts: all
"""

import torch
from _report import batches, report, start
from torch import nn

start()


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 8)
        self.register_buffer("mask", torch.eye(8).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.mask, self.body(x).T).T.relu().to_sparse()


model = Sparse()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
losses = []
for x in batches():
    optimizer.zero_grad()
    loss = torch.sparse.sum(model(x)) / len(x)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report([model.body], [optimizer], losses)
