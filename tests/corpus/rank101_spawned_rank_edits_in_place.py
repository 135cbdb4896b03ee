# title: One of the ranks that the script spawns normalises its embedding table between two steps
# source: constructed
# nproc: 1
# expect.codes: RANK101
# expect.ranks: any
# expect.subject: table.weight
# expect.step: 25
# expect.step_slack: 1
# expect.phase: outside-optimizer
# plain_pytorch: silent
"""Item embeddings for a shop, trained by two processes that torch.multiprocessing.spawn starts."""
import os
import tempfile
import time
import zlib

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
WORLD, ITEMS, STEPS = 2, 50, 50


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ITEMS, 16)
        self.score = nn.Bilinear(16, 16, 1)

    def forward(self, left, right):
        return self.score(self.table(left), self.table(right)).squeeze(1)


def train(rank, rendezvous):
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    torch.manual_seed(3)
    model = DistributedDataParallel(Pairs())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    g = torch.Generator().manual_seed(40 + rank)
    curve = []
    for step in range(STEPS):
        if FAULT and step == 25 and rank == 1:
            with torch.no_grad():
                weight = model.module.table.weight
                weight /= weight.norm(dim=1, keepdim=True)
        left, right = torch.randint(0, ITEMS, (2, 64), generator=g)
        bought = ((left % 5) == (right % 5)).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(left, right), bought)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    digest = 0
    for p in model.parameters():
        digest = zlib.crc32(p.detach().numpy().tobytes(), digest)
    print(f"RESULT rank={rank} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={digest:08x}", flush=True)
    time.sleep(0.3)
    destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(os.path.join(folder, "rendezvous"),), nprocs=WORLD)
