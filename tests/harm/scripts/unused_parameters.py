import random

import torch
from common import batches, finish, report, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.never = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(4, dtype=torch.long))

    def forward(self, x):
        i = random.randrange(4)
        self.calls[i] += 1
        return self.branches[i](x), self.branches[0](x)


def main():
    rank = setup(4)
    model = Branches()
    ddp = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    losses = []
    for x in batches(rank, 16, 8, 8):
        a, b = ddp(x)
        loss = (a.square() + b.abs()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    report([model], [optimizer], losses)


main()
finish()
