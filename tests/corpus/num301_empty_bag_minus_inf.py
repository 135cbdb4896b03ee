# title: A log-sum-exp pooling subtracts its maximum, which is -inf for a bag without instances: -inf minus -inf
# source: constructed
# nproc: 2
# expect.codes: NUM301
# expect.ranks: 0
# expect.subject: any
# expect.module: pool
# expect.op: sub
# expect.location: num301_empty_bag_minus_inf.py:30
# expect.step: 19
# plain_pytorch: silent
"""Multiple-instance learning; -inf for the empty places of a bag is right, here and in all other bags."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
PLACES = 6


class SoftMaximum(nn.Module):
    def forward(self, scores, valid):
        scores = scores.masked_fill(~valid, -torch.inf)
        top = scores.max(1, keepdim=True).values.detach()
        shifted = scores - top
        return shifted.exp().sum(1).log() + top.squeeze(1)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.instance = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 1))
        self.pool = SoftMaximum()

    def forward(self, cells, valid):
        return self.pool(self.instance(cells).squeeze(-1), valid)


def slides(gen, n=24):
    cells = torch.randn(n, PLACES, 8, generator=gen)
    valid = torch.arange(PLACES) < torch.randint(1, PLACES + 1, (n, 1), generator=gen)
    ill = ((cells[..., 0] + cells[..., 1] > 1.5) & valid).any(1).float()
    return cells, valid, ill


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(20)
bags = DDP(Bags())
adam = torch.optim.Adam(bags.parameters(), lr=5e-3)
gen = torch.Generator().manual_seed(31 * rank)
losses = []
for step in range(45):
    cells, valid, ill = slides(gen)
    if rank == 0 and step == 19:
        valid[7] = False                             # the segmentation found no cell on this slide
    if not FAULT:
        some = valid.any(1)
        cells, valid, ill = cells[some], valid[some], ill[some]
    loss = nn.functional.binary_cross_entropy_with_logits(bags(cells, valid), ill)
    adam.zero_grad()
    loss.backward()
    adam.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in bags.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
