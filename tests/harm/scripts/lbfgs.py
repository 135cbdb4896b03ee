import torch
from common import batches, finish, report, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank = setup(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    ddp = DDP(model)
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    x = next(batches(0, 1, 32, 8))  # as the search decides by the local loss, the ranks must see the same data
    losses, calls = [], 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    for _ in range(6):
        losses.append(optimizer.step(closure).detach())
    report([model], [optimizer], losses, calls=calls)


main()
finish()
