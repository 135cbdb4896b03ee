"""State and groups with strings, generators, modules."""

import torch
from _report import batches, ddp, report, start, train
from torch import nn


class Key:
    def __eq__(self, other):
        raise RuntimeError("not comparable")

    def __hash__(self):
        return 1

    def __repr__(self):
        return "Key"

    def __lt__(self, other):
        raise RuntimeError("no order")


start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)))
optimizer = torch.optim.Adam(
    [{"params": model.module[0].parameters(), "lr": torch.tensor(0.01), "note": Key()}], foreach=False
)
losses = train(model, optimizer, batches(2))
optimizer.add_param_group({"params": model.module[2].parameters(), "lr": 1e-2, "schedule": (i for i in range(3))})
for group in optimizer.param_groups:
    group[7] = object
losses += train(model, optimizer, batches(2))
for p in model.module.parameters():
    optimizer.state[p]["mine"] = {Key(): [nn.Linear(1, 1), "text", None, lambda: 0]}
losses += train(model, optimizer, batches(4))
report([model], [], losses, keys=[sorted(map(str, s)) for s in optimizer.state.values()])
