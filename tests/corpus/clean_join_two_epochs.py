# title: Hard clean: two epochs of uneven inputs, each inside its own Join; ranks count different steps afterwards
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""After the first Join the ranks' step counts differ for ever, and nothing is wrong."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def shard(rank, epoch, generator):
    """Rank 1 has three batches more, fresh ones in each epoch."""
    for _ in range(14 + 3 * rank):
        x = torch.randn(20, 6, generator=generator)
        yield x, (x[:, :2].sum(1, keepdim=True) > 0).float()


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(4)
net = DDP(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)))
opt = torch.optim.SGD(net.parameters(), lr=0.3)
gen = torch.Generator().manual_seed(70 + rank)
losses = []
for epoch in range(3):
    with net.join():
        for x, y in shard(rank, epoch, gen):
            loss = nn.functional.binary_cross_entropy_with_logits(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
