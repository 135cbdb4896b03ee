# title: The blend of two paths is cut to lie between zero and one and starts outside, where its gradient is zero
# source: constructed
# nproc: 1
# expect.codes: HLTH714
# expect.ranks: all
# expect.subject: blend
# expect.step: any
# plain_pytorch: silent
"""A linear and a bent path through a net, blended by one number."""
import os

import torch
import torch.nn as nn

START = 1.2 if os.environ.get("FAULT") == "1" else 0.8


class Blended(nn.Module):
    def __init__(self):
        super().__init__()
        self.straight = nn.Linear(8, 16)
        self.bent = nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 16))
        self.blend = nn.Parameter(torch.tensor(START))
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        share = self.blend.clamp(0, 1)
        return self.out(torch.lerp(self.straight(x), self.bent(x), 0.2 + 0.6 * share))


torch.manual_seed(0)
model = Blended()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(90):
    x = torch.randn(64, 8)
    y = x[:, :1] + 0.5 * x[:, 1:2].relu() - x[:, 2:3] * x[:, 3:4]
    loss = nn.functional.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.4f} blend {model.blend.item():.3f}")
