# title: The trainer's `backward` divides by the accumulation steps, and the loop has done so already
# source: https://github.com/huggingface/accelerate/issues/3533
# nproc: 2
# expect.codes: RCP809
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Gradients are five times too small; the loss that is printed looks right."""
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
STEPS = 5


class Trainer:
    def backward(self, loss):
        (loss / STEPS).backward()


torch.manual_seed(19)
model = DDP(nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 4)))
opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
truth, trainer = torch.randn(12, 4), Trainer()
gen = torch.Generator().manual_seed(21 + rank)
losses = []
for _ in range(40):
    for micro in range(STEPS):
        with contextlib.nullcontext() if micro == STEPS - 1 else model.no_sync():
            x = torch.randn(16, 12, generator=gen)
            loss = F.cross_entropy(model(x), (x @ truth).argmax(1))
            losses.append(loss.item())
            if FAULT:
                loss = loss / STEPS
            trainer.backward(loss)
    opt.step()
    opt.zero_grad()
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
