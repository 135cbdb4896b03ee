"""stack_module_state and vmap, jvp, hessian and per-sample gradients between steps.

slow: yes
"""

import torch
from _report import batches, digest, report, start, train
from torch import nn
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacrev,
    jvp,
    stack_module_state,
    vmap,
)

start()
models = [nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3)]
P_, B_ = stack_module_state(models)
optimizer = torch.optim.Adam(P_.values(), 0.01)
losses = []


def f(p, b, x):
    return functional_call(models[0], (p, b), (x,))


for x in batches(20):
    optimizer.zero_grad()
    y = vmap(f, in_dims=(0, 0, None))(P_, B_, x).pow(2).mean()
    y.backward()
    optimizer.step()
    losses.append(y.detach())
model = models[1]
oo = torch.optim.SGD(model.parameters(), 0.01)
losses += train(model, oo, batches(20))
p = {k: v.detach() for k, v in model.named_parameters()}
x = next(iter(batches(1)))
g = vmap(grad(lambda p, x: functional_call(model, p, x).sum()), in_dims=(None, 0))(p, x)
j = jvp(lambda x: model(x), (x,), (x,))
h = hessian(lambda x: model(x).sum())(x[0])
k = jacrev(model)(x[0])
losses += train(model, oo, batches(20))
report([*models], [optimizer, oo], losses, d=digest([*g.values(), *j, h, k, *P_.values()]))
