# title: A dictionary of metrics keeps the tensors that it is given
# source: constructed
# nproc: 2
# expect.codes: MEM403
# expect.ranks: all
# expect.subject: metrics['nll']
# expect.step: 0
# expect.step_slack: 2
# plain_pytorch: silent
"""Gaussian negative log-likelihood with a learned variance; curves are collected in a dictionary of lists."""
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

torch.manual_seed(9)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(6, 40), nn.SiLU(), nn.Linear(40, 2)))
opt = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(90 + rank)
metrics = {"nll": [], "spread": [], "lr": []}


def record(**values):
    for key, value in values.items():
        metrics[key].append(value if FAULT or not torch.is_tensor(value) else value.item())


for step in range(56):
    x = torch.randn(40, 6, generator=gen)
    y = x.sum(1) * 0.3 + 0.2 * torch.randn(40, generator=gen)
    mean, log_var = ddp(x).unbind(1)
    nll = nn.functional.gaussian_nll_loss(mean, y, log_var.exp())
    opt.zero_grad()
    nll.backward()
    opt.step()
    record(nll=nll, spread=float(log_var.detach().mean()), lr=opt.param_groups[0]["lr"])
first, final = float(metrics["nll"][0]), float(metrics["nll"][-1])
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
