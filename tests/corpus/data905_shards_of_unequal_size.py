# title: The shards of the ranks have different numbers of batches
# source: constructed
# nproc: 2
# expect.codes: DATA905
# expect.ranks: any
# expect.subject: loader
# expect.step: any
# plain_pytorch: error
"""A shard per rank, cut by hand; in the fault one has two batches more, and the epochs run against each other."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
size = 160 + (32 if FAULT and rank == 1 else 0)
generator = torch.Generator().manual_seed(80 + rank)
x = torch.randn(size, 10, generator=generator)
y = x[:, :3].prod(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=generator)
torch.manual_seed(24)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for epoch in range(4):
    for features, target in loader:
        loss = F.mse_loss(model(features), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
