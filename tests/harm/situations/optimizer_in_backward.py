"""One small optimizer per parameter, stepped inside of backward."""

import torch
from _report import batches, report, start
from torch import nn

start()
model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}


def step(p):
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step)
losses = []
for x in batches():
    loss = model(x).square().mean()
    loss.backward()
    losses.append(loss.detach())
report([model], list(optimizers.values()), losses)
