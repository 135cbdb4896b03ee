"""torch.func: vmap over grad, functional_call, an optimizer fed by hand."""

import torch
from _report import batches, report, start
from torch import nn
from torch.func import functional_call, grad, vmap

start()
model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []


def loss_of(parameters, row):
    return functional_call(model, parameters, (row[None],)).square().mean()


for x in batches():
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = vmap(grad(loss_of), (None, 0))(parameters, x)
    for name, p in model.named_parameters():
        p.grad = gradients[name].mean(0)
    optimizer.step()
    losses.append(vmap(loss_of, (None, 0))(parameters, x).mean())
report([model], [optimizer], losses)
