# title: Each evaluation seeds torch, and training goes on from there: every epoch draws the same noise
# source: constructed
# nproc: 2
# expect.codes: DATA902
# expect.ranks: all
# expect.subject: random numbers
# expect.step: 18
# expect.step_slack: 1
# plain_pytorch: silent
"""A denoiser whose samples shall be comparable; the seed is set, and the generator is not put back."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"


def sample(model, rank):
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(enabled=not FAULT):
        torch.manual_seed(99 + rank)
        x = torch.randn(6, 8)
        for _ in range(3):
            x = x - 0.3 * model.module(x)
    model.train()


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(36)
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8)))
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=4e-3), []
clean = torch.randn(192, 2, generator=torch.Generator().manual_seed(7)) @ torch.randn(2, 8)
data = TensorDataset(clean)
torch.manual_seed(360 + rank)
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 16, sampler=sampler)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        noise = torch.randn_like(x)
        loss = F.mse_loss(model(x + noise), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sample(model, rank)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
