# title: Attention scores of the future are -inf on purpose, and every row keeps at least itself
# source: constructed
# nproc: 3
# expect.codes: none
# plain_pytorch: silent
"""The mask is added by a module of its own, so a module's output is non-finite in every step and all is well."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class HideTheFuture(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1))

    def forward(self, scores):
        return scores + self.mask


class Attention(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.hide = HideTheFuture(length)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.hide(q @ k.mT / x.shape[-1] ** 0.5).softmax(-1) @ v


class Copyist(nn.Module):
    def __init__(self, letters=12, width=32, length=10):
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(Attention(width, length) for _ in range(2))
        self.next = nn.Linear(width, letters)

    def forward(self, ids):
        x = self.letter(ids) + self.place
        for layer in self.layers:
            x = x + layer(x)
        return self.next(x)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(13)
model = DDP(Copyist())
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(45):
    pace = torch.randint(1, 4, (24, 1), generator=gen)
    ids = (torch.randint(0, 12, (24, 1), generator=gen) + pace * torch.arange(11)) % 12
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
