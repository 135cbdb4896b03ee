# title: Averaged weights are evaluated while the model itself stays in train mode
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""An exponential average with its own dropout switched off is what is validated; the model has no part in it."""
import copy
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def batch(gen, n=40):
    y = torch.randint(0, 3, (n,), generator=gen)
    return torch.randn(n, 9, generator=gen) + 1.5 * F.one_hot(y, 9), y


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(21)
net = nn.Sequential(nn.Linear(9, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))
average = copy.deepcopy(net).eval().requires_grad_(False)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
torch.manual_seed(210 + rank)
gen, val_gen = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(99)
held_out = [batch(val_gen) for _ in range(6)]
losses = []
for step in range(72):
    x, y = batch(gen)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    with torch.no_grad():
        for mean, own in zip(average.parameters(), net.parameters()):
            mean.lerp_(own, 0.1)
        for mean, own in zip(average.buffers(), net.buffers()):
            mean.copy_(own)
        if step % 12 == 11:
            found = sum(F.cross_entropy(average(x), y).item() for x, y in held_out) / len(held_out)
            if rank == 0:
                print(f"step {step}: {found:.4f}", flush=True)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
