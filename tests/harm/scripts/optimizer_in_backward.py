import torch
from common import batches, finish, report, setup
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def train(rank, ddp):
    losses = []
    for x in batches(rank, 10, 8, 16):
        loss = (ddp(x) - x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


def by_hand(rank):
    """Plain module: one optimizer for each parameter, stepped and cleared by a hook."""
    model = net()
    optimizers = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    losses = train(rank, model)
    report([model], list(optimizers.values()), losses)


def by_torch(rank):
    """With DDP this needs an accelerator in torch 2.13."""
    model = net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    losses = train(rank, model)
    report([model], [o for p in model.parameters() for o in p._in_backward_optimizers], losses)


rank = setup(9)
by_hand(rank)
by_torch(rank)
finish()
