# title: A rate falls in three steps by batches, and another model's by epochs, in one run that is cut short
# source: constructed
# nproc: 1
# expect.codes: none
# plain_pytorch: silent
"""Two small models of the same tides: one by steps, one by epochs of a plan that is longer than what is run here."""
import time
import zlib

import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR, StepLR

torch.set_num_threads(1)
torch.manual_seed(30)
PLAN = 90
first = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
second = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
by_step, by_epoch = torch.optim.Adam(first.parameters(), lr=1e-2), torch.optim.Adam(second.parameters(), lr=1e-2)
falls = MultiStepLR(by_step, [50, 70, 80], gamma=0.3)
plan = StepLR(by_epoch, PLAN // 3)
losses = []
for epoch in range(9):
    for _ in range(10):
        tide = torch.randn(32, 6)
        level = tide[:, :3].sum(1, keepdim=True).sin()
        for model, optimizer in ((first, by_step), (second, by_epoch)):
            loss = nn.functional.mse_loss(model(tide), level)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        falls.step()
    plan.step()
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in first.parameters()))
print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
