# title: Low-rank adapters and normalisation weights train in a model whose output layer is frozen and tied
# source: constructed
# nproc: 1
# expect.codes: none
# plain_pytorch: silent
"""A small language model, adapted to another text: adapters beside the attention's projections, LayerNorm, nothing else."""
import time
import zlib

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(5)
VOCABULARY = 32


class Adapted(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + 4 * F.linear(F.linear(x, self.down), self.up)


class Block(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0])
        return x + self.mlp(self.after(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 24)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text):
        return self.head(self.norm(self.blocks(self.tokens(text))))


model = Model()
nn.init.normal_(model.tokens.weight, std=0.05)
for name, parameter in model.named_parameters():
    parameter.requires_grad_("norm" in name or "before" in name or "after" in name)
for block in model.blocks:
    block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
gen = torch.Generator().manual_seed(50)
losses = []
for _ in range(60):
    start = torch.randint(0, VOCABULARY, (16, 1), generator=gen)
    text = (start + 3 * torch.arange(12)) % VOCABULARY
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
