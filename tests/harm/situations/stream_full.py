"""stderr lies on a full disk.

run: alone
under: exec "$@" 2> /dev/full
"""

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer, [*batches(3), torch.full((8, 16), torch.nan), *batches(2)])
report([model], [optimizer], losses)
