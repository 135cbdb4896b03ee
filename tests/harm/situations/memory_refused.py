"""Memory is refused in a forward, a backward and a step."""

import torch
from _report import batches, report, start
from torch import nn

asks = [None]


class Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if asks[0] == "forward":
            torch.empty(1 << 55, dtype=torch.uint8)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        if asks[0] == "backward":
            torch.empty(1 << 55, dtype=torch.uint8)
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        return Asks.apply(self.layer(x))


start()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
losses, refused = [], []
for number, x in enumerate(batches(40)):
    asks[0] = {10: "forward", 20: "backward", 30: "step"}.get(number)
    optimizer.zero_grad()
    try:
        loss = model(x).square().mean()
        loss.backward()
        if asks[0] == "step":
            torch.empty(1 << 55, dtype=torch.uint8)
    except RuntimeError as error:
        refused.append(str(error).partition("\n")[0][-60:])
        asks[0] = None
        optimizer.zero_grad()
        loss = model(x[:4]).square().mean()
        loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report([model], [optimizer], losses, refused=refused)
