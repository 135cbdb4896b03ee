# title: ReduceLROnPlateau with its usual mode, min, is stepped with an accuracy
# source: https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html
# nproc: 2
# expect.codes: RCP806
# expect.ranks: all
# expect.subject: ReduceLROnPlateau
# expect.step: 72
# expect.step_slack: 14
# expect.location: rcp806_plateau_of_an_accuracy.py:48
# plain_pytorch: silent
"""Says on which of five shelves a parcel belongs."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(5)
model = DDP(nn.Sequential(nn.Linear(9, 48), nn.ReLU(), nn.Linear(48, 5)))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="min" if FAULT else "max", factor=0.3, patience=1)
shelf = torch.randn(9, 5, generator=torch.Generator().manual_seed(2))
held = torch.randn(256, 9, generator=torch.Generator().manual_seed(3))
gen = torch.Generator().manual_seed(60 + rank)
losses = []
for epoch in range(10):
    for _ in range(12):
        parcel = torch.randn(32, 9, generator=gen)
        loss = F.cross_entropy(model(parcel), (parcel @ shelf).argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        time.sleep(0.002)
    model.eval()
    with torch.no_grad():
        right = (model.module(held).argmax(1) == (held @ shelf).argmax(1)).float().mean()
    model.train()
    schedule.step(right.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} loss={sum(losses[-10:]) / 10:.4f} crc={crc:08x}", flush=True)
dist.destroy_process_group()
