import torch
from common import batches, finish, report, setup
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank = setup(5)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for epoch in range(2):
        with Join([ddp]) if epoch else ddp.join(divide_by_initial_world_size=False):
            for x, y in batches(rank, 6 + 5 * rank, 8, 16, classes=5):
                loss = F.cross_entropy(ddp(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
    report([model], [optimizer], losses)


main()
finish()
