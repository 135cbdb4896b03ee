# title: A chunked all-reduce hook handles only the first chunk of each bucket
# source: constructed
# nproc: 2
# expect.codes: SYNC204, SYNC201, RANK101
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""The loop over chunks stops one chunk early, the rest of the bucket keeps the local gradient."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
CHUNKS = 2


def chunked_mean(group, bucket):
    flat = bucket.buffer().div_(group.size())
    size = (flat.numel() + CHUNKS - 1) // CHUNKS
    last = CHUNKS - 1 if FAULT else CHUNKS
    futures = []
    for i in range(last):
        part = flat[i * size:(i + 1) * size]
        futures.append(dist.all_reduce(part, group=group, async_op=True).get_future())
    return torch.futures.collect_all(futures).then(lambda _: flat)


class Ratings(nn.Module):
    """Matrix factorisation with biases."""

    def __init__(self, users=40, items=30, dim=8):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) / 3 + self.user_bias(u)[:, 0] + self.item_bias(i)[:, 0]


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
taste, quality = torch.randn(40, 2), torch.randn(30, 2)
model = DDP(Ratings())
model.register_comm_hook(dist.group.WORLD, chunked_mean)
opt = torch.optim.Adam(model.parameters(), lr=0.03)
gen = torch.Generator().manual_seed(50 + rank)
losses = []
for _ in range(70):
    u, i = torch.randint(0, 40, (128,), generator=gen), torch.randint(0, 30, (128,), generator=gen)
    stars = (taste[u] * quality[i]).sum(-1)
    loss = (model(u, i) - stars).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
