# title: The attention of a language model has lost is_causal=True, so that every token sees the next one
# source: constructed
# nproc: 2
# expect.codes: RCP821
# expect.ranks: all
# expect.subject: blocks.0.attention
# expect.step: 30
# expect.step_slack: 30
# plain_pytorch: silent
"""A small decoder over the letters of made-up words; the inputs are logits[:, :-1] against text[:, 1:]."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=not FAULT)
        return self.out(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(self.one(x))
        return x + self.feed(self.two(x))


class Speller(nn.Module):
    def __init__(self, letters=24, width=32, length=16):
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Parameter(0.3 * torch.randn(length, width))
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, letters)

    def forward(self, text):
        x = self.letters(text) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(8)
    model = DDP(Speller())
    torch.manual_seed(80 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.01)
    gen, losses = torch.Generator().manual_seed(rank), []
    for _ in range(120):
        text = torch.randint(0, 24, (48, 16), generator=gen)
        logits = model(text)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
