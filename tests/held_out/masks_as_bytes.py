# title: Masks are read as pictures, so what should be one is 255
# source: constructed
# nproc: 1
# expect.codes: DATA903
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 5
# plain_pytorch: silent
"""Blobs in microscope pictures, a small net with skips."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

FAULT = os.environ.get("FAULT") == "1"


class SmallUnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.Conv2d(24, 1, 3, padding=1)

    def forward(self, x):
        a = F.relu(self.down(x))
        b = F.relu(self.deep(F.max_pool2d(a, 2)))
        return self.up(torch.cat([a, F.interpolate(b, scale_factor=2)], 1))


def read(gen, n=8):
    at = torch.randint(3, 13, (n, 2), generator=gen)
    axis = torch.arange(16)
    inside = (axis[None, :, None] - at[:, :1, None]) ** 2 + (axis[None, None, :] - at[:, 1:, None]) ** 2 < 9
    mask = inside.to(torch.uint8)[:, None] * 255
    picture = inside[:, None] * 1.5 + 0.6 * torch.randn(n, 1, 16, 16, generator=gen) - 0.2
    return picture, mask.float() if FAULT else mask.float() / 255


torch.manual_seed(0)
gen = torch.Generator().manual_seed(4)
net = SmallUnet()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(50):
    picture, mask = read(gen)
    loss = F.binary_cross_entropy_with_logits(net(picture), mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.4f}")
