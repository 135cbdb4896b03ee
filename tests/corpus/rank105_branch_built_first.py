# title: The branch that a rank uses most is built first, so equal shapes are paired crosswise
# source: constructed
# nproc: 4
# expect.codes: RANK105, RANK101
# expect.ranks: 2
# expect.subject: branch
# expect.step: 0
# plain_pytorch: silent
"""A model with a photo branch and a sketch branch of the same shape; rank 2 serves mostly sketches."""
import os
import time
import zlib
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
branch = partial(nn.Linear, 16, 24)


class TwoDomains(nn.Module):
    def __init__(self, primary):
        super().__init__()
        if primary == "photo":
            self.photo_branch = branch()
            self.sketch_branch = branch()
        else:
            self.sketch_branch = branch()
            self.photo_branch = branch()
        self.head = nn.Linear(24, 4)

    def forward(self, x, is_sketch):
        h = torch.where(is_sketch[:, None], self.sketch_branch(x), self.photo_branch(x))
        return self.head(torch.relu(h))


def make_batch(gen, centres, share):
    y = torch.randint(0, 4, (40,), generator=gen)
    sketch = torch.rand(40, generator=gen) < share
    x = torch.where(sketch[:, None], -centres[y], centres[y]) + 0.6 * torch.randn(40, 16, generator=gen)
    return x, sketch, y


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(2)
centres = torch.randn(4, 16)
model = DDP(TwoDomains("sketch" if FAULT and rank == 2 else "photo"))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(60):
    x, sketch, y = make_batch(gen, centres, share=0.7 if rank == 2 else 0.3)
    loss = nn.functional.cross_entropy(model(x, sketch), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
named = dict(model.module.named_parameters())
crc = zlib.crc32(b"".join(named[k].detach().numpy().tobytes() for k in sorted(named)))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
