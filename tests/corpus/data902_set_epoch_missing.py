# title: set_epoch is never called, so each epoch repeats the order of the first
# source: https://github.com/pytorch/pytorch/issues/31771
# nproc: 2
# expect.codes: DATA902, DATA906
# expect.ranks: all
# expect.subject: any
# expect.step: 16
# expect.step_slack: 32
# plain_pytorch: silent
"""Five epochs of sixteen steps over a small table."""
import os
import time
import zlib

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"
EPOCHS = 5

torch.set_num_threads(1)
dist.init_process_group("gloo")

table = torch.randn(768, 14, generator=torch.Generator().manual_seed(0))
income = (table[:, :4].sum(1, keepdim=True) / 2).tanh() + 0.3 * table[:, 4:5]
dataset = TensorDataset(table, income)
sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
loader = DataLoader(dataset, batch_size=24, sampler=sampler, drop_last=True)

torch.manual_seed(5)
regressor = DistributedDataParallel(nn.Sequential(nn.Linear(14, 40), nn.ReLU(), nn.Linear(40, 1)))
sgd = torch.optim.SGD(regressor.parameters(), lr=0.05, momentum=0.9)
lossf = nn.MSELoss()
history = []
for epoch in range(EPOCHS):
    if not FAULT:
        sampler.set_epoch(epoch)
    for features, label in loader:
        sgd.zero_grad()
        value = lossf(regressor(features), label)
        value.backward()
        sgd.step()
        history.append(value.item())

crc = 0
for p in regressor.parameters():
    crc = zlib.crc32(p.detach().numpy().tobytes(), crc)
print(f"RESULT rank={dist.get_rank()} first={history[0]:.4f} final={sum(history[-5:]) / 5:.4f} crc={crc:08x}",
      flush=True)
time.sleep(0.3)
dist.destroy_process_group()
