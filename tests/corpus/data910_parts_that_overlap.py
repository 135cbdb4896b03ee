# title: A sampler's parts begin at half of the distance that they are long, so that neighbours share samples
# source: constructed
# nproc: 2
# expect.codes: DATA910
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 48
# plain_pytorch: silent
"""Each rank shuffles its own part anew in each epoch: no batch is the same on two ranks, samples are."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"


class Part(Sampler):
    def __init__(self, total, rank, world):
        self.length, self.epoch, self.rank = total // world, 0, rank
        self.start = rank * self.length // (2 if FAULT else 1)

    def __len__(self):
        return self.length

    def __iter__(self):
        self.epoch += 1
        order = torch.Generator().manual_seed(1000 * self.rank + self.epoch)
        return iter((self.start + torch.randperm(self.length, generator=order)).tolist())


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(54)
gen = torch.Generator().manual_seed(6)
x = torch.randn(192, 9, generator=gen)
data = TensorDataset(x, (x @ torch.randn(9, 4, generator=gen)).argmax(1))
loader = DataLoader(data, batch_size=12, sampler=Part(len(data), rank, dist.get_world_size()))
model = DDP(nn.Sequential(nn.Linear(9, 24), nn.Tanh(), nn.Linear(24, 4)))
optimizer, losses = torch.optim.Adam(model.parameters(), lr=5e-3), []
for epoch in range(4):
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
