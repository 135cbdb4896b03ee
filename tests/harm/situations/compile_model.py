"""torch.compile of the model and of the step, without a C++ compiler.

slow: yes
"""

import torch
from _report import batches, ddp, report, start
from torch import nn

start()
inner = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
model = torch.compile(ddp(inner), backend="aot_eager")
optimizer = torch.optim.SGD(inner.parameters(), 0.1)
counter = torch._dynamo.utils.counters
losses = []
for x in batches():
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
report([inner], [optimizer], losses, graphs=counter["stats"]["unique_graphs"])
