# title: The mean over a user's clicked items divides by the number of clicks, which is 0 for a new user
# source: constructed
# nproc: 2
# expect.codes: NUM301
# expect.ranks: 1
# expect.subject: any
# expect.module: user.history
# expect.op: div
# expect.location: num301_history_without_items.py:31
# expect.step: 17
# plain_pytorch: silent
"""A two-tower recommender whose output is a dict; the towers share the item table."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class MaskedMean(nn.Module):
    def forward(self, vectors, mask):
        total = (vectors * mask[..., None]).sum(1)
        count = mask.sum(1, keepdim=True)
        if not FAULT:
            count = count.clamp_min(1.0)
        return total / count


class UserTower(nn.Module):
    def __init__(self, items, width):
        super().__init__()
        self.items = items
        self.history = MaskedMean()
        self.project = nn.Linear(width, width)

    def forward(self, clicks):
        return torch.tanh(self.project(self.history(self.items(clicks), (clicks > 0).float())))


class Recommender(nn.Module):
    def __init__(self, n_items=400, width=24):
        super().__init__()
        items = nn.Embedding(n_items, width, padding_idx=0)
        self.user = UserTower(items, width)
        self.item = nn.Sequential(items, nn.Linear(width, width))

    def forward(self, clicks, candidate):
        user, item = self.user(clicks), self.item(candidate)
        return {"user": user, "item": item, "score": (user * item).sum(-1)}


def sessions(gen, n=32, length=8, n_items=400):
    taste = torch.randint(0, 4, (n, 1), generator=gen)
    clicks = torch.randint(1, 100, (n, length), generator=gen) + 99 * taste
    clicks = clicks * (torch.arange(length) < torch.randint(1, length + 1, (n, 1), generator=gen))
    candidate = torch.randint(1, n_items, (n,), generator=gen)
    return clicks, candidate, ((candidate - 1) // 99 == taste[:, 0]).float()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = DDP(Recommender())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(45):
        clicks, candidate, liked = sessions(gen)
        if rank == 1 and step == 17:
            clicks[5] = 0
        loss = nn.functional.binary_cross_entropy_with_logits(model(clicks, candidate)["score"], liked)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
