import torch
from common import batches, finish, report, setup
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 5))


def train(rank, ddp, model, step_function=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = optimizer.step if step_function is None else step_function(optimizer.step)
    losses = []
    for x, y in batches(rank, 4, 8, 16, classes=5):
        loss = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        step()
        losses.append(loss.detach())
    return losses, optimizer


def main():
    rank = setup(8)
    for where, backend in (("inside", "eager"), ("inside", "aot_eager"), ("around", "aot_eager"), ("method", "eager")):
        torch._dynamo.reset()
        counters.clear()
        model = net()
        if where == "inside":
            ddp = DDP(torch.compile(model, backend=backend))
        elif where == "around":
            ddp = torch.compile(DDP(model), backend=backend)
        else:
            model.compile(backend=backend)
            ddp = DDP(model)
        losses, optimizer = train(rank, ddp, model)
        print(where, "graphs", counters["stats"]["unique_graphs"])
        report([model], [optimizer], losses)
        del ddp
    torch._dynamo.reset()
    model = net()
    ddp = DDP(model)
    losses, optimizer = train(rank, ddp, model, lambda f: torch.compile(f, backend="eager"))
    report([model], [optimizer], losses)


main()
finish()
