# title: Gradients are clipped after the step that they were meant for
# source: constructed
# nproc: 2
# expect.codes: RCP813
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 4
# plain_pytorch: silent
"""The step sees gradients as they came, and the clipped ones are cleared unused."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(53)
gen, truth = torch.Generator().manual_seed(920 + rank), torch.randn(10, 2)
model = DDP(nn.Sequential(nn.Linear(10, 20), nn.SiLU(), nn.Linear(20, 2)))
optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
for step in range(20):
    x = torch.randn(16, 10, generator=gen)
    loss = nn.functional.mse_loss(model(x), (x @ truth).tanh())
    optimizer.zero_grad()
    loss.backward()
    if FAULT:
        optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 0.4)
    if not FAULT:
        optimizer.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
