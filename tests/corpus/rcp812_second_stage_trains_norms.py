# title: In the second stage the filter leaves only the normalisation layers to train
# source: constructed
# nproc: 1
# expect.codes: RCP812
# expect.ranks: all
# expect.step_slack: 40
# plain_pytorch: silent
"""Leaf spectra: a body that was trained on one task is tuned for a second one, with an optimizer of its own."""
import os
import time
import zlib

import torch
from torch import nn
from torch.nn import functional as F

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.inner, self.norm = nn.Linear(24, 40), nn.LayerNorm(40)
        self.outer, self.norm_out = nn.Linear(40, 40), nn.LayerNorm(40)
        self.classify = nn.Linear(40, classes)

    def forward(self, x):
        h = self.norm(F.gelu(self.inner(x)))
        return self.classify(self.norm_out(h + F.gelu(self.outer(h))))


def leaves(gen, classes, n=48):
    kind = torch.randint(0, classes, (n,), generator=gen)
    centre = 3 + (20 / classes) * kind[:, None]
    return torch.exp(-((torch.arange(24) - centre) ** 2) / 8) + 0.1 * torch.randn(n, 24, generator=gen), kind


def train(model, opt, classes, seed, steps):
    gen = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        x, kind = leaves(gen, classes)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), kind)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(2)
model = Net(5)
losses = train(model, torch.optim.Adam(model.parameters(), lr=3e-3), 5, 1, 40)
model.classify = nn.Linear(40, 3)
for name, p in model.named_parameters():
    p.requires_grad = "norm" in name if FAULT else "norm" in name or name.startswith("classify")
tuned = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
losses += train(model, tuned, 3, 7, 60)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
