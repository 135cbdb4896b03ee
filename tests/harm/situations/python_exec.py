"""Model and loop come from exec, without a source file."""

import torch
from _report import batches, ddp, report, start
from torch import nn

SOURCE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)
    def forward(self, x):
        return self.linear(x)

def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""

start()
exec(compile(SOURCE, "<made up>", "exec"))
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = [step(x) for x in batches()]
losses += [eval("step(x)") for x in [torch.full((8, 16), float("nan"))]]
report([model], [optimizer], losses)
