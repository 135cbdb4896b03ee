# title: Noise against overfitting is added in forward whatever the mode is
# source: constructed
# nproc: 1
# expect.codes: RCP820
# expect.ranks: all
# expect.step: 25
# expect.step_slack: 1
# expect.location: rcp820_noise_always_added.py:35
# plain_pytorch: silent
"""A forecast of room temperatures in one process; the jitter of its inputs was meant for training alone."""
import os
import time
import zlib

import torch
from torch import nn
from torch.nn import functional as F

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)


class Forecast(nn.Module):
    def __init__(self, hours=24, jitter=0.05):
        super().__init__()
        self.jitter = jitter
        self.body = nn.Sequential(nn.Linear(hours, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.out = nn.Linear(48, 1)

    def forward(self, past):
        scale = past.std(1, keepdim=True)
        x = past / scale
        if FAULT or self.training:
            noise = self.jitter * torch.randn_like(x)
            x = x + noise
        return self.out(self.body(x)).squeeze(1) * scale.squeeze(1)


def days(gen, n=48):
    phase = 6.2832 * torch.rand(n, 1, generator=gen)
    hours = torch.arange(25) / 24 * 6.2832
    curve = (1 + torch.rand(n, 1, generator=gen)) * torch.sin(hours + phase)
    curve = curve + 0.02 * torch.randn(n, 25, generator=gen)
    return curve[:, :-1], curve[:, -1]


torch.manual_seed(5)
model = Forecast()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(77)
held_out = [days(torch.Generator().manual_seed(700 + i)) for i in range(3)]
losses = []
for _ in range(3):
    model.train()
    for _ in range(25):
        past, nxt = days(gen)
        loss = F.mse_loss(model(past), nxt)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        error = sum(F.l1_loss(model(past), nxt).item() for past, nxt in held_out) / len(held_out)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
