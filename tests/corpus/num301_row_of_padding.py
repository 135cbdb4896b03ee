# title: A sentence that is all padding leaves an attention row with nothing but -inf, and its softmax is NaN
# source: https://github.com/pytorch/pytorch/issues/41508
# nproc: 3
# expect.codes: NUM301, NUM303
# expect.ranks: 1
# expect.subject: any
# expect.module: encoder.layers.0.attention
# expect.op: softmax
# expect.location: num301_row_of_padding.py:36
# expect.step: 8
# plain_pytorch: silent
"""Two attention heads by hand; padding is zeroed before the sum, so the loss stays finite, and backward does not."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x, padding):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (w // self.heads) ** 0.5
        scores = scores.masked_fill(padding[:, None, None, :], float("-inf"))
        weights = scores.softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(b, t, w)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)

    def forward(self, x, padding):
        return x + self.attention(self.norm(x), padding)


class Encoder(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x, padding):
        for layer in self.layers:
            x = layer(x, padding)
        return x.masked_fill(padding[..., None], 0.0).sum(1)


class Sentiment(nn.Module):
    def __init__(self, words=60, width=24):
        super().__init__()
        self.word = nn.Embedding(words, width, padding_idx=0)
        self.encoder = Encoder(width, 2)
        self.score = nn.Linear(width, 2)

    def forward(self, ids):
        return self.score(self.encoder(self.word(ids), ids == 0))


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(18)
model = DDP(Sentiment())
opt = torch.optim.Adam(model.parameters(), lr=4e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for step in range(40):
    ids = torch.randint(1, 60, (20, 9), generator=gen)
    ids *= torch.arange(9) < torch.randint(2, 10, (20, 1), generator=gen)
    label = ((ids > 40).sum(1) > (ids > 0).sum(1) / 3).long()
    if step == 8 and rank == 1:
        ids[13] = 0                                  # a comment of emoji only
        if not FAULT:
            ids, label = ids[ids.any(1)], label[ids.any(1)]
    loss = nn.functional.cross_entropy(model(ids), label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
