# title: A running average of the loss is a tensor with the graphs of all steps
# source: https://docs.pytorch.org/docs/stable/notes/faq.html
# nproc: 2
# expect.codes: MEM403
# expect.ranks: all
# expect.subject: average
# expect.step: 0
# expect.step_slack: 2
# plain_pytorch: silent
"""Logistic regression on parity of signs; the smoothed loss decides when to print."""
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
rank = dist.get_rank()

torch.manual_seed(12)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
opt = torch.optim.RMSprop(ddp.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(120 + rank)
average, track = None, []
for step in range(60):
    x = torch.randn(64, 8, generator=gen)
    y = (x[:, 0] * x[:, 1] > 0).float().unsqueeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(ddp(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    value = loss if FAULT else loss.item()
    average = value if average is None else 0.98 * average + 0.02 * value
    track.append(float(average))
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
