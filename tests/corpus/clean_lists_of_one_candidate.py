# title: Some lists to rank hold a single candidate, so that the softmax of their loss has one entry
# source: constructed
# nproc: 1
# expect.codes: none
# plain_pytorch: silent
"""Which answer is the right one? Lists of one to six candidates; the first ones, of a warm-up, have one or two."""

import os
import time
import zlib

import torch
import torch.nn.functional as F
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
torch.manual_seed(6)
gen = torch.Generator().manual_seed(61)
score = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 1))
optimizer = torch.optim.Adam(score.parameters(), lr=3e-3)
taste = torch.randn(10, generator=gen)
losses = []
for step in range(80):
    length = 1 if step < 3 else int(torch.randint(1, 7, (), generator=gen))
    candidates = torch.randn(16, length, 10, generator=gen)
    right = (candidates @ taste).argmax(1)
    loss = F.cross_entropy(score(candidates).squeeze(-1), right)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in score.parameters()))
print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
