# title: Queries and keys start so large that attention looks at one position
# source: constructed
# nproc: 1
# expect.codes: HLTH704
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 12
# plain_pytorch: silent
"""Attention as written by hand: the softmax is no module, and its weights go straight into a product."""

import os
import time
import zlib

import torch
from torch import nn
from torch.nn import functional as F

FAULT = os.environ.get("FAULT", "0") == "1"


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        if FAULT:
            nn.init.normal_(self.qkv.weight, std=1.0)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        att = F.softmax(q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5, dim=-1)
        return self.proj((att @ v).transpose(1, 2).reshape(b, t, d))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.atts = nn.ModuleList(Attention(32, 2) for _ in range(2))
        self.out = nn.Linear(32, 2)

    def forward(self, x):
        x = self.inp(x)
        for norm, att in zip(self.norms, self.atts):
            x = x + att(norm(x))
        return self.out(x.mean(1))


def main():
    torch.set_num_threads(1)
    rank = 0
    torch.manual_seed(3)
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(10 + rank)
    losses = []
    for step in range(60):
        x = torch.randn(32, 12, 6, generator=gen)
        y = (x[:, :, 0].sum(1) > 0).long()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())

    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)


if __name__ == "__main__":
    main()
