# title: One rank's batch has no positive sample, so its box branch is never called
# source: constructed
# nproc: 2
# expect.codes: SYNC207, SYNC201, RANK101, HANG502, HANG503
# expect.ranks: 1
# expect.subject: box
# expect.step: 12
# expect.step_slack: 1
# plain_pytorch: error
"""A detector in miniature. Rank 0 waits in its all-reduce, rank 1 fails at its next forward."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 48), nn.ReLU())
        self.objectness = nn.Linear(48, 1)
        self.box = nn.Linear(48, 4)

    def forward(self, x, positive, boxes):
        h = self.trunk(x)
        loss = F.binary_cross_entropy_with_logits(self.objectness(h)[:, 0], positive.float())
        if positive.any():
            loss = loss + F.smooth_l1_loss(self.box(h[positive]), boxes[positive])
        elif not FAULT:
            loss = loss + 0.0 * self.box(h).sum()          # keeps the branch in the graph
        return loss


def proposals(gen, n=40):
    x = torch.randn(n, 16, generator=gen)
    return x, x[:, 0] > 0.5, x[:, 4:8].tanh()


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(10)
model = DDP(Detector())
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for it in range(60):
    x, positive, boxes = proposals(gen)
    if it == 12 and rank == 1:
        positive = torch.zeros_like(positive)
        x[:, 0] = -x[:, 0].abs()
    loss = model(x, positive, boxes)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
