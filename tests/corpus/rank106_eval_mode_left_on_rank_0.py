# title: Rank 0 evaluates and never goes back to training mode
# source: constructed
# nproc: 3
# expect.codes: RANK106, RCP804
# expect.ranks: 0
# expect.subject: any
# expect.step: 20
# plain_pytorch: silent
"""Dropout is off on rank 0 from the first evaluation onwards."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lookup = nn.Embedding(50, 24)
        self.drop = nn.Dropout(0.25)
        self.conv = nn.Conv1d(24, 32, 3, padding=1)
        self.norm = nn.GroupNorm(4, 32)
        self.tag = nn.Linear(32, 5)

    def forward(self, ids):
        h = self.drop(self.lookup(ids)).transpose(1, 2)
        h = F.relu(self.norm(self.conv(h))).transpose(1, 2)
        return self.tag(self.drop(h))


def sentences(g, n=16):
    ids = torch.randint(0, 50, (n, 14), generator=g)
    return ids, ids % 5


@torch.no_grad()
def accuracy(module, g):
    module.eval()
    ids, tags = sentences(g, 64)
    score = (module(ids).argmax(-1) == tags).float().mean().item()
    if not FAULT:
        module.train()
    return score


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(8)
    model = DistributedDataParallel(Tagger())
    torch.manual_seed(8000 + rank)                 # dropout masks of their own
    adam = torch.optim.Adam(model.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(rank)
    held_out = torch.Generator().manual_seed(12345)
    losses = []
    for step in range(60):
        if step in (20, 40):
            if rank == 0:
                print(f"step {step}: accuracy {accuracy(model.module, held_out):.3f}", flush=True)
            dist.barrier()
        ids, tags = sentences(g)
        loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
