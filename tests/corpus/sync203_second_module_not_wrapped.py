# title: The projection head lives outside DDP and is stepped by the same optimizer
# source: constructed
# nproc: 3
# expect.codes: SYNC203, RANK113, SYNC201, RANK101
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""The backbone is wrapped, the margin head is not, although every rank needs the same one."""
import itertools
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class CosineHead(nn.Module):
    def __init__(self, dim, identities):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(identities, dim))

    def forward(self, z):
        return 4 * F.normalize(z) @ F.normalize(self.prototypes).T


def faces(gen, base, n=40):
    who = torch.randint(0, len(base), (n,), generator=gen)
    return base[who] + 0.7 * torch.randn(n, base.shape[1], generator=gen), who


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(38)
    base = torch.randn(8, 20)
    backbone = DDP(nn.Sequential(nn.Linear(20, 40), nn.PReLU(), nn.Linear(40, 16)))
    margin = CosineHead(16, 8)
    if not FAULT:
        margin = DDP(margin)
    opt = torch.optim.SGD(itertools.chain(backbone.parameters(), margin.parameters()), lr=0.05, momentum=0.9)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        x, who = faces(gen, base)
        loss = F.cross_entropy(margin(backbone(x)), who)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    everything = itertools.chain(backbone.parameters(), margin.parameters())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in everything))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
