# title: A replay buffer grows on purpose, and says so
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Value regression from a buffer that grows to its capacity."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpdebug

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(31)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.Adam(ddp.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(310 + rank)
ddpdebug.expect_growth("replay buffer", 200 << 20)
buffer, track = [], []
for step in range(70):
    buffer.append(torch.randn(4000, 64, generator=gen))
    chosen = buffer[int(torch.randint(0, len(buffer), (1,), generator=gen))]
    x = chosen[torch.randint(0, 4000, (64,), generator=gen)]
    loss = (ddp(x) - x[:, :1].tanh()).square().mean()
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
