# title: Rank 0 saves a checkpoint every 30 steps, for which all wait
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Four classes; saving is the slowest part."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(69)
net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
ddp = DistributedDataParallel(net)
opt = torch.optim.Adam(ddp.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(690 + rank)
truth = torch.randn(128, 4, generator=torch.Generator().manual_seed(7))
track = []
for step in range(300):
    x = torch.randn(96, 128, generator=gen)
    loss = nn.functional.cross_entropy(ddp(x), (x @ truth).argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
    if step % 30 == 29:
        if rank == 0:
            time.sleep(0.3)  # a checkpoint goes to a slow share
        dist.barrier()
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
