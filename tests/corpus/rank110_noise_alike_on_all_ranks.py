# title: All ranks draw the same noise for their different samples
# source: constructed
# nproc: 2
# expect.codes: RANK110
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""A denoiser that draws its noise in forward; the fault leaves all ranks with the seed of the initialisation."""
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


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))

    def forward(self, x):
        level = torch.rand(len(x), 1)
        noise = torch.randn_like(x)
        return F.mse_loss(self.net(torch.cat([x + level * noise, level], 1)), noise)


torch.manual_seed(50)
model = DDP(Denoiser())
if not FAULT:
    torch.manual_seed(50 + rank)
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(rank)
basis = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
losses = []
for _ in range(50):
    loss = model(torch.randn(32, 3, generator=gen) @ basis)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
