"""A model of torch's own class trains, then compiled, then inside a compiled function.

run: alone
slow: yes
"""

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer)
losses += train(torch.compile(model, fullgraph=True, backend="eager"), optimizer)


@torch.compile(fullgraph=True, backend="eager")
def loss_of(x):
    return model(x).square().mean()


for x in batches():
    optimizer.zero_grad()
    loss = loss_of(x)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report([model], [optimizer], losses)
