"""A batch in the sparse CSR layout."""

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer, [torch.eye(16)[i : i + 8].to_sparse_csr() for i in range(6)])
report([model], [optimizer], losses)
