"""Compiled autograd around an eager loop whose first steps are plain, as one graph or an error

parts: all
"""
import torch
import torch._dynamo
from _report import report, start
from torch import nn

start()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []


def step():
    loss = model(torch.randn(6, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss)


for _ in range(6):
    step()
with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
    for _ in range(10):
        step()
report([model], [optimizer], losses)
