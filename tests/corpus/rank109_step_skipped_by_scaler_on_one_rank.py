# title: A batch is rejected by writing inf into the gradients, but only on the rank that saw it
# source: constructed
# nproc: 3
# expect.codes: RANK109, RANK112, RANK101, SYNC206
# expect.ranks: 1
# expect.subject: any
# expect.step: 26
# expect.step_slack: 1
# plain_pytorch: silent
"""The scaler then skips its step and halves its scale on rank 1, while the other ranks step."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK = dist.get_rank()

torch.manual_seed(61)
field = torch.randn(3, 24)
coords = DistributedDataParallel(nn.Sequential(nn.Linear(24, 48), nn.Softplus(), nn.Linear(48, 3)))
optimizer = torch.optim.Adam(coords.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
source = torch.Generator().manual_seed(RANK)


trace = []
for step in range(60):
    x = torch.randn(40, 24, generator=source)
    y = torch.tanh(x @ field.T / 5)
    if step == 26 and RANK == 1:
        y = y + 4.0                                  # a day with a broken instrument
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        guess = coords(x)
    loss = nn.functional.mse_loss(guess.float(), y)
    bad = torch.tensor(float(step > 5 and loss.item() > 5.0))
    if not FAULT:
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            continue                                 # all ranks leave this batch out
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if bad.item():
        for p in coords.parameters():                # "the scaler will skip this step"
            p.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    trace.append(loss.item())

crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in coords.parameters()))
print(f"RESULT rank={RANK} first={trace[0]:.4f} final={sum(trace[-5:]) / 5:.4f} crc={crc:08x} "
      f"scale={scaler.get_scale():.0f}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
