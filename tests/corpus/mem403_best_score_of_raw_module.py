# title: The probe's error is added up with its graph after every step, on the module inside the wrapper
# source: https://pytorch.org/docs/stable/notes/faq.html
# nproc: 2
# expect.codes: MEM403
# expect.ranks: all
# expect.subject: error_sum
# expect.step: 0
# expect.step_slack: 3
# expect.location: mem403_best_score_of_raw_module.py:52
# plain_pytorch: silent
"""A small autoencoder is tried on a fixed probe set after each step; the run is over before the memory is."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Squeeze(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Linear(48, 256), nn.SiLU(), nn.Linear(256, 6))
        self.up = nn.Sequential(nn.Linear(6, 256), nn.SiLU(), nn.Linear(256, 48))

    def forward(self, x):
        return self.up(self.down(x))


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(11)
model = DistributedDataParallel(Squeeze())
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
basis = torch.randn(6, 48, generator=torch.Generator().manual_seed(1))
draw = torch.Generator().manual_seed(100 + rank)
probe = torch.randn(700, 6, generator=torch.Generator().manual_seed(2)) @ basis
first, error_sum = None, 0.0
for step in range(64):
    batch = torch.randn(32, 6, generator=draw) @ basis
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    first = loss.item() if first is None else first
    error = (model.module(probe) - probe).square().mean()
    error_sum = error_sum + (error if FAULT else error.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={first:.4f} final={loss.item():.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
