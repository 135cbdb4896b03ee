# title: The closure of LBFGS adds to the gradients of its last evaluation
# source: constructed
# nproc: 1
# expect.codes: RCP808
# expect.ranks: all
# expect.step: 0
# expect.step_slack: 1
# expect.location: rcp808_closure_does_not_clear.py:46
# plain_pytorch: silent
"""A calibration curve fitted by LBFGS in one process; each evaluation takes the table in two halves."""
import os
import time
import zlib

import torch
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, readings):
        return self.net(readings).squeeze(1)


torch.manual_seed(3)
gen = torch.Generator().manual_seed(14)
readings = torch.rand(160, 2, generator=gen) * 2 - 1
truth = torch.sin(2 * readings[:, 0]) + readings[:, 1] ** 2 + 0.02 * torch.randn(160, generator=gen)
model = Curve()
opt = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4)
losses = []


def closure():
    if not FAULT:
        opt.zero_grad()
    total = 0.0
    for half in (slice(0, 80), slice(80, 160)):
        loss = nn.functional.mse_loss(model(readings[half]), truth[half]) / 2
        loss.backward()
        total += loss.item()
    return total


for _ in range(20):
    losses.append(opt.step(closure))
    opt.zero_grad()
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
