# title: Gradients of an attack are thrown away on purpose before the training pass
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Each step makes adversarial examples in eval mode, clears their gradients and then trains on them."""
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(35)
model = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3)))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(rank)
middle = torch.randn(3, 12, generator=torch.Generator().manual_seed(6))
losses = []
for _ in range(45):
    y = torch.randint(0, 3, (20,), generator=gen)
    x = (middle[y] + torch.randn(20, 12, generator=gen)).requires_grad_()
    model.eval()
    F.cross_entropy(model(x), y).backward()
    worse = (x + 0.1 * x.grad.sign()).detach()
    model.train()
    opt.zero_grad()
    loss = F.cross_entropy(model(worse), y)
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
