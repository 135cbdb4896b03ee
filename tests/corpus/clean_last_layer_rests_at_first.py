# title: The gradients of the last layer are taken away for the first steps, as self-distillation does
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The backbone settles before the layer that the targets go through moves."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(7)
body, last = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 16)), nn.Linear(16, 5, bias=False)
model = DDP(nn.Sequential(body, last))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
gen = torch.Generator().manual_seed(70 + rank)
rule = torch.randn(10, 5, generator=torch.Generator().manual_seed(1))
track = []
for step in range(80):
    x = torch.randn(32, 10, generator=gen)
    loss = nn.functional.cross_entropy(model(x), (x @ rule).argmax(1))
    opt.zero_grad()
    loss.backward()
    if step < 24:
        last.weight.grad = None
    opt.step()
    track.append(loss.item())
    time.sleep(0.002)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={track[0]:.4f} final={track[-1]:.4f} crc={crc:08x}", flush=True)
dist.destroy_process_group()
