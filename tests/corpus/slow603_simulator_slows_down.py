# title: The simulator that the steps wait for answers more slowly after a while
# source: constructed
# nproc: 2
# expect.codes: SLOW603
# expect.ranks: all
# expect.subject: any
# expect.step: 300
# expect.step_slack: 64
# plain_pytorch: silent
"""A policy that imitates: a simulator elsewhere plays each step's episodes."""
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
torch.manual_seed(67)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 5)))
opt = torch.optim.Adam(ddp.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(670 + rank)
expert = torch.randn(24, 5, generator=torch.Generator().manual_seed(5))


def play(step):
    """Wait for the episodes of the simulator, whose log has grown too long for its memory."""
    time.sleep(0.06 if FAULT and step >= 300 else 0.03)
    states = torch.randn(64, 24, generator=gen)
    return states, (states @ expert).argmax(1)


track = []
for step in range(440):
    states, actions = play(step)
    loss = nn.functional.cross_entropy(ddp(states), actions)
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
