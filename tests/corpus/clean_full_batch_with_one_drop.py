# title: An epoch is one batch: a rate falls once by a milestone, another falls in a line and then stays
# source: constructed
# nproc: 1
# expect.codes: none
# plain_pytorch: silent
"""Two regressions of a sine on all points at once, stepped by their schedules in every epoch, which is every step."""
import time
import zlib

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR

torch.set_num_threads(1)
gen = torch.Generator().manual_seed(14)
points = torch.randn(200, 8, generator=gen)
waves = torch.sin(points @ torch.randn(8, 3, generator=gen)) + 0.1 * torch.randn(200, 3, generator=gen)
torch.manual_seed(6)
jobs = []
for make in (lambda opt: MultiStepLR(opt, [80], 0.1), lambda opt: LinearLR(opt, 1.0, 0.1, total_iters=60)):
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    jobs.append((model, opt, make(opt)))
losses = []
for _ in range(200):
    for model, opt, schedule in jobs:
        loss = nn.functional.mse_loss(model(points), waves)
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
crc = 0
for number, (model, _, _) in enumerate(jobs):
    for name, param in sorted(model.named_parameters()):
        crc = zlib.crc32(param.detach().numpy().tobytes(), zlib.crc32(f"{number}.{name}".encode(), crc))
print(f"RESULT rank=0 first={losses[0]:.6f} final={losses[-1]:.6f} crc={crc:08x}")
time.sleep(0.3)
