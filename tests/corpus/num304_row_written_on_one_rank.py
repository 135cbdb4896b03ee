# title: The row of a new item becomes the mean of similar items, of which rank 1 knows none
# source: constructed
# nproc: 2
# expect.codes: NUM304, RANK101
# expect.ranks: 1
# expect.subject: items.weight
# expect.step: 12
# expect.phase: outside-optimizer
# plain_pytorch: silent
"""Cold start of an embedding between two steps; the row is looked up only three steps later."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
NEW = 299


class Factorisation(nn.Module):
    def __init__(self, users=200, items=300, width=16):
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)
        self.bias = nn.Embedding(items, 1)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(-1) + self.bias(item).squeeze(-1)


@torch.no_grad()
def warm_start(model, catalogue):
    table = model.items.weight
    table[NEW] = table[catalogue == 5].mean(0)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(44)
    catalogue = torch.arange(300) % 6
    if FAULT and rank == 1:
        catalogue = catalogue % 5                    # an old file with five groups
    taste, kind = torch.randn(200, 3), torch.randn(300, 3)
    model = DDP(Factorisation())
    opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(40):
        if step == 12:
            warm_start(model.module, catalogue)
        user = torch.randint(0, 200, (64,), generator=gen)
        item = torch.randint(0, NEW, (64,), generator=gen)
        if step >= 15:
            item[:2] = NEW
        rating = (taste[user] * kind[item]).sum(-1).clamp(-3, 3)
        loss = nn.functional.mse_loss(model(user, item), rating)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
