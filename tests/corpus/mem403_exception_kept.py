# title: Batches that raise are remembered with their exceptions, whose frames hold the graph
# source: https://github.com/python/cpython/issues/80847
# nproc: 2
# expect.codes: MEM403
# expect.ranks: all
# expect.subject: traceback
# expect.step: 0
# expect.step_slack: 2
# plain_pytorch: silent
"""Every batch is checked after the forward; the errors go on a list to be counted at the end."""
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

torch.manual_seed(21)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)))
opt = torch.optim.SGD(ddp.parameters(), lr=0.02)
gen = torch.Generator().manual_seed(210 + rank)


def check(prediction, limit):
    penalty = (prediction.abs() - limit).clamp(min=0).sum()
    if float(penalty) > 0:
        raise ValueError(f"prediction outside of the range by {float(penalty):.3f}")


errors, track = [], []
for step in range(60):
    x = torch.randn(32, 10, generator=gen)
    out = ddp(x)
    loss = nn.functional.mse_loss(out, x[:, :1] * x[:, 1:2])
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
    try:
        check(out, 0.01)
    except ValueError as error:
        errors.append(error if FAULT else str(error))
first, final = track[0], sum(track[-5:]) / 5
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
