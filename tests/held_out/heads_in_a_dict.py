# title: The heads of a model stand in an ordinary dict
# source: constructed
# nproc: 1
# expect.codes: RCP817
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Sea state from a buoy: height, period and direction of the waves."""
import os

import torch
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


class Buoy(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.trunk = nn.GRU(3, 24, batch_first=True)
        heads = {name: nn.Linear(24, size) for name, size in outputs.items()}
        self.heads = heads if FAULT else nn.ModuleDict(heads)

    def forward(self, motion):
        last = self.trunk(motion)[1][-1]
        return {name: head(last) for name, head in self.heads.items()}


def sea(n=24):
    height, period = 0.5 + torch.rand(n, 1), 1 + torch.rand(n, 1)
    towards = torch.randn(n, 2)
    time = torch.arange(20) * 0.5
    wave = height * torch.sin(time / period)
    motion = torch.stack([wave, wave * towards[:, :1], wave * towards[:, 1:]], 2)
    return motion, {"height": height, "period": period - 1, "towards": towards}


torch.manual_seed(0)
model = Buoy({"height": 1, "period": 1, "towards": 2})
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(80):
    motion, truth = sea()
    guess = model(motion)
    loss = sum(nn.functional.mse_loss(guess[k], truth[k]) for k in truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.4f}")
