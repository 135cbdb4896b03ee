# title: Validation runs through the inner module with gradients on, and keeps its logits
# source: https://github.com/TRI-ML/packnet-sfm/issues/47
# nproc: 2
# expect.codes: MEM403
# expect.ranks: all
# expect.subject: logits
# expect.step: 8
# expect.step_slack: 8
# plain_pytorch: silent
"""A small classifier is validated after every step; the logits are collected for a metric that is never computed."""
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

torch.manual_seed(6)
net = nn.Sequential(nn.Linear(20, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 3))
ddp = DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.05)
gen = torch.Generator().manual_seed(70 + rank)
held_out = torch.randn(400, 20, generator=torch.Generator().manual_seed(1))


class Validator:
    def __init__(self):
        self.logits = []

    def __call__(self, model, inputs):
        if FAULT:
            self.logits.append(model(inputs))
        else:
            with torch.no_grad():
                self.logits.append(model(inputs).argmax(1).sum())


validate = Validator()
track = []
for step in range(64):
    x = torch.randn(48, 20, generator=gen)
    loss = nn.functional.cross_entropy(ddp(x), (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
    validate(net, held_out)
first, final = track[0], sum(track[-5:]) / 5
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
