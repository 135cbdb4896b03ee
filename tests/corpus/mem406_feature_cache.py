# title: Features are cached under keys that never come back
# source: constructed
# nproc: 2
# expect.codes: MEM406
# expect.ranks: all
# expect.subject: cache
# expect.step: 8
# expect.step_slack: 8
# plain_pytorch: silent
"""A frozen feature extractor in front of a trained head; its outputs are cached by sample number."""
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

torch.manual_seed(14)
extract = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 1024)).requires_grad_(False)
ddp = DistributedDataParallel(nn.Linear(1024, 1))
opt = torch.optim.SGD(ddp.parameters(), lr=1e-4)
gen = torch.Generator().manual_seed(14 + rank)


class Cache:
    def __init__(self, size):
        self.size, self.rows = size, {}

    def features(self, step, batch):
        key = (rank, step)
        if key not in self.rows:
            self.rows[key] = extract(batch)
            if not FAULT and len(self.rows) > self.size:
                self.rows.pop(next(iter(self.rows)))
        return self.rows[key]


cache, track = Cache(4), []
for step in range(68):
    x = torch.randn(200, 16, generator=gen)
    loss = nn.functional.mse_loss(ddp(cache.features(step, x)), x[:, :1])
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
