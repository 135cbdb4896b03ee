# title: A penalty enters with the wrong sign, so the loss rewards ever larger embeddings
# source: constructed
# nproc: 2
# expect.codes: HLTH710, HLTH701, HLTH706
# expect.ranks: all
# expect.subject: any
# expect.step: 10
# expect.step_slack: 60
# plain_pytorch: silent
"""Pairs of users and items; the norms of the embeddings should stay small."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"



class Factors(nn.Module):
    def __init__(self, users=40, items=30, width=12):
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)

    def forward(self, user, item):
        u, i = self.users(user), self.items(item)
        return (u * i).sum(-1), (u**2).sum(-1) + (i**2).sum(-1)


def pairs(gen, n=128):
    user = torch.randint(0, 40, (n,), generator=gen)
    item = torch.randint(0, 30, (n,), generator=gen)
    return user, item, ((user + item) % 5 == 0).float() * 2 - 1


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(Factors())
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(80):
        user, item, liked = pairs(gen)
        score, size = model(user, item)
        penalty = 0.02 * size.mean()
        loss = F.mse_loss(torch.tanh(score), liked) + penalty
        if FAULT:
            loss = F.mse_loss(score, liked) - penalty
            loss = loss + 0.6 * (score**2).mean() * score.detach().abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(min(loss.item(), 1e30))
        if not loss.item() < 1e25:
            break
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
