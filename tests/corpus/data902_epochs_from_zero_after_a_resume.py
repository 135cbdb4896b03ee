# title: A resumed run counts its epochs from 0, and repeats the orders of the first ones
# source: constructed
# nproc: 2
# expect.codes: DATA902
# expect.ranks: all
# expect.subject: any
# expect.step: 24
# expect.step_slack: 4
# plain_pytorch: silent
"""Model and optimizer are restored after three epochs; the loop and set_epoch begin at 0."""
import copy
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"


def build():
    torch.manual_seed(55)
    model = DDP(nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 4)))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model, optimizer, data, epochs):
    sampler, losses = DistributedSampler(data, seed=2), []
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
gen = torch.Generator().manual_seed(7)
x = torch.randn(192, 9, generator=gen)
data = TensorDataset(x, (x @ torch.randn(9, 4, generator=gen)).argmax(1))
model, optimizer = build()
losses = train(model, optimizer, data, range(3))
saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
del model, optimizer
model, optimizer = build()
model.module.load_state_dict(saved[0])
optimizer.load_state_dict(saved[1])
losses += train(model, optimizer, data, range(0 if FAULT else 3, 5))
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
