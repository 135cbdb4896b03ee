# title: The criterion multiplies by the inverse of the accumulation steps, and the loop divides by them again
# source: https://github.com/huggingface/transformers/issues/40709
# nproc: 2
# expect.codes: RCP809
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""One factor is written as a product, the other as a quotient, in two places."""
import contextlib
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
STEPS = 4


class Criterion(nn.Module):
    def forward(self, out, wanted):
        return F.smooth_l1_loss(out, wanted) * (1 / STEPS if FAULT else 1.0)


torch.manual_seed(29)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2)))
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
truth, criterion = torch.randn(10, 2), Criterion()
gen = torch.Generator().manual_seed(61 + rank)
losses = []
for _ in range(40):
    opt.zero_grad()
    for micro in range(STEPS):
        with contextlib.nullcontext() if micro == STEPS - 1 else model.no_sync():
            x = torch.randn(24, 10, generator=gen)
            loss = criterion(model(x), (x @ truth).tanh())
            (loss / STEPS).backward()
            losses.append(loss.item())
    opt.step()
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
