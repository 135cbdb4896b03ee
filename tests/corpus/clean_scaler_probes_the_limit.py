# title: GradScaler raises its scale every 25 steps and sometimes takes it back, as it is meant to
# source: https://pytorch.org/docs/stable/amp.html
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Gradients are Inf in the skipped steps, on all ranks alike, and no parameter ever is."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP


class Tones(nn.Module):
    def __init__(self):
        super().__init__()
        self.listen = nn.Sequential(nn.Conv1d(1, 8, 7, stride=3), nn.ReLU(), nn.Conv1d(8, 8, 5, stride=2), nn.ReLU())
        self.name = nn.Linear(8, 4)

    def forward(self, wave):
        return self.name(self.listen(wave).mean(-1))


def tones(gen, n=32):
    note = torch.randint(0, 4, (n,), generator=gen)
    t = torch.arange(64.0) + 6.28 * torch.rand(n, 1, generator=gen)
    return torch.sin(t * (0.3 + 0.25 * note[:, None]))[:, None] + 0.1 * torch.randn(n, 1, 64, generator=gen), note


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(47)
model = DDP(Tones())
opt = torch.optim.Adam(model.parameters(), lr=4e-3)
scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=25)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(80):
    wave, note = tones(gen)
    with autocast("cpu", dtype=torch.float16):
        logits = model(wave)
    loss = nn.functional.cross_entropy(logits.float(), note)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} "
      f"scale={scaler.get_scale():.0f}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
