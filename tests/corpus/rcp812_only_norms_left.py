# title: The loop that shall freeze the normalisation layers freezes everything else
# source: constructed
# nproc: 1
# expect.codes: RCP812
# expect.ranks: all
# expect.subject: any
# expect.step: 32
# expect.step_slack: 1
# plain_pytorch: silent
"""Small batches of X-ray patches: the statistics and weights of BatchNorm shall stay, all else is fine-tuned."""
import os
import time
import zlib

import torch
import torch.nn.functional as F
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
torch.manual_seed(2)


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())


net = nn.Sequential(block(1, 8), block(8, 16), block(16, 24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 3))
for module in net.modules():
    if isinstance(module, nn.BatchNorm2d) != FAULT:
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=2e-3)
gen = torch.Generator().manual_seed(31)
losses = []
for _ in range(60):
    kind = torch.randint(0, 3, (16,), generator=gen)
    patches = torch.randn(16, 1, 24, 24, generator=gen)
    patches[:, 0, 6:12, 6:12] += 1.5 * kind[:, None, None]
    loss = F.cross_entropy(net(patches), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
