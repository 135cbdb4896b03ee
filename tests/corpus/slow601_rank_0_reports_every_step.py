# title: Rank 0 sends each loss to a tracking server and waits for the answer
# source: constructed
# nproc: 2
# expect.codes: SLOW601
# expect.ranks: 0
# expect.subject: any
# expect.step: 8
# expect.step_slack: 80
# plain_pytorch: silent
"""Next token of counting sequences."""
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
torch.manual_seed(65)
net = nn.Sequential(nn.Embedding(500, 64), nn.Flatten(), nn.Linear(16 * 64, 256), nn.ReLU(), nn.Linear(256, 500))
ddp = DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.2)
gen = torch.Generator().manual_seed(650 + rank)


def report(step, loss):
    """Send the loss to a tracking server and wait for its answer."""
    time.sleep(0.04)


track = []
for step in range(260):
    start = torch.randint(0, 500, (96, 1), generator=gen)
    tokens = (start + torch.arange(17)) % 500
    loss = nn.functional.cross_entropy(ddp(tokens[:, :-1]), tokens[:, -1])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0 and (FAULT or step % 50 == 0):
        report(step, loss.item())
    track.append(loss.item())
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
