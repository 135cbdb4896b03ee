# title: The total of a schedule is computed before the loader is sharded: the run ends at the top of its rate
# source: constructed
# nproc: 2
# expect.codes: RCP806
# expect.ranks: any
# expect.subject: OneCycleLR
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""The schedule is as many times too long as there are ranks."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"
EPOCHS = 3

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(56)
gen = torch.Generator().manual_seed(8)
x = torch.randn(256, 9, generator=gen)
data = TensorDataset(x, (x @ torch.randn(9, 4, generator=gen)).argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 4)))
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
batches = len(data) // 16 if FAULT else len(loader)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=EPOCHS * batches)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
