"""Filled uninitialised memory, deterministic operations, under a default device and half precision."""

import torch
from _report import batches, report, start
from torch import nn

start()
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
torch.set_default_dtype(torch.bfloat16)
losses, refused = [], 0
with torch.device("cpu"):
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for x in batches(40):
        optimizer.zero_grad()
        loss = model(x.bfloat16()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        try:
            torch.empty(3).put_(torch.tensor([0, 0]), torch.ones(2))
        except RuntimeError:
            refused += 1
    empty = torch.empty(3, dtype=torch.int64).tolist()
report([model], [optimizer], losses, refused=refused, empty=empty, default=torch.get_default_device())
