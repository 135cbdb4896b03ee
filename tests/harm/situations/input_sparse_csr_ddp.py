"""A batch in the sparse CSR layout, DDP on two ranks.

ranks: 2
"""

import torch
from _report import ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer, [torch.eye(16)[i : i + 8].to_sparse_csr() for i in range(6)])
report([model], [optimizer], losses)
