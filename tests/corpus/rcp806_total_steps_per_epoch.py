# title: A decay over all steps is stepped once per epoch, and the rate stays where it began
# source: constructed
# nproc: 1
# expect.codes: RCP806
# expect.ranks: all
# expect.subject: SequentialLR
# expect.step: 0
# plain_pytorch: silent
"""Wind power from the weather. Warm-up and cosine over all optimizer steps; gradients of two batches make one step."""
import math
import os
import time
import zlib

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"
EPOCHS, ACCUMULATE = 6, 2
torch.set_num_threads(1)
torch.manual_seed(14)
weather = torch.randn(480, 8)
power = (weather[:, :2].square().sum(1, keepdim=True) / 2).tanh()
loader = DataLoader(TensorDataset(weather, power), batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
total = EPOCHS * math.ceil(len(loader) / ACCUMULATE)
warm = LinearLR(optimizer, 0.5, total_iters=4)
scheduler = SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, T_max=total - 4)], milestones=[4])
losses = []
for epoch in range(EPOCHS):
    for number, (x, y) in enumerate(loader, 1):
        loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
        loss.backward()
        losses.append(loss.item() * ACCUMULATE)
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            if not FAULT:
                scheduler.step()
    if FAULT:
        scheduler.step()
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
