# title: A target network, a frozen body and a checkpointed block all run without gradients inside the forward
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Reentrant checkpointing runs the block under no_grad first; the averaged target is meant to learn nothing itself."""
import copy
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class Bootstrap(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(12, 24).requires_grad_(False)
        self.online = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x, moved):
        with torch.no_grad():
            x, moved = self.body(x), self.body(moved)
            wanted = self.target(moved)
        return F.mse_loss(checkpoint(self.block, self.online(x), use_reentrant=True), F.normalize(wanted, dim=-1))

    @torch.no_grad()
    def follow(self):
        for old, new in zip(self.target.parameters(), self.online.parameters()):
            old.lerp_(new, 0.01)


torch.manual_seed(29)
model = DDP(Bootstrap())
opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(50):
    x = torch.randn(32, 12, generator=gen)
    loss = model(x, x + 0.1 * torch.randn(32, 12, generator=gen))
    opt.zero_grad()
    loss.backward()
    opt.step()
    model.module.follow()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
