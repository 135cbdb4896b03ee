"""Gathers of outputs into lists that count accesses; two ranks.

ranks: 2
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from _report import batches, ddp, finish, report, start, train
from torch import nn


class Counted(list):
    """Counts what is asked of it."""

    asked = 0

    def __getitem__(self, index):
        Counted.asked += 1
        return super().__getitem__(index)

    def __iter__(self):
        Counted.asked += 1
        return super().__iter__()

    def __len__(self):
        Counted.asked += 1
        return super().__len__()


start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
rank, losses = dist.get_rank(), train(model, optimizer, batches(10))
for k, x in enumerate(batches(40)):
    optimizer.zero_grad()
    out = model(x)
    parts = [Counted, list][k % 2](torch.empty_like(out) for _ in range(2))
    how = k % 5
    if how == 4:
        parts = list(with_gradients.all_gather(out))
    else:
        dist.all_gather(parts, out)
    if how == 0:
        parts[rank] = out
    loss = out.square().mean() if how == 1 else torch.cat([*parts]).square().mean() + 0 * out.sum()
    if how == 2:
        parts.clear()
    if how == 3:  # of a step that is given up
        loss = None
    del parts
    if loss is not None:
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    del loss, out
report([model], [optimizer], losses, asked=Counted.asked)
del model
finish()
