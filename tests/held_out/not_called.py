# title: zero_grad stands there without its brackets
# source: constructed
# nproc: 1
# expect.codes: RCP808
# expect.ranks: all
# expect.subject: any
# expect.step: 1
# expect.step_slack: 20
# plain_pytorch: silent
"""Growth of plants; the healthy twin collects three batches before it clears."""
import os

import torch
from torch import nn

FAULT = os.environ.get("FAULT") == "1"
EACH = 1 if FAULT else 3

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 20), nn.Softplus(), nn.Linear(20, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.005)
batches = 70 * EACH
for i in range(1, batches + 1):
    light = torch.rand(16, 7)
    height = (light[:, :3].prod(1) * 4 + light[:, 3]).unsqueeze(1)
    loss = nn.functional.mse_loss(model(light), height) / EACH
    loss.backward()
    if i % EACH == 0:
        opt.step()
        if FAULT:
            opt.zero_grad
        else:
            opt.zero_grad()
print(loss.item() * EACH)
