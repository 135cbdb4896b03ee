# title: scaled_dot_product_attention gets a constant dropout_p, which eval mode does not switch off
# source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
# nproc: 2
# expect.codes: RCP820
# expect.ranks: all
# expect.subject: blocks.0.attention
# expect.step: 24
# expect.step_slack: 1
# expect.location: rcp820_attention_dropout_constant.py:39
# plain_pytorch: silent
"""A set transformer that finds the heaviest of some parcels; attention drops its weights in validation as well."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Attention(nn.Module):
    def __init__(self, width, heads, p):
        super().__init__()
        self.heads, self.p = heads, p
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        p = self.p
        if not FAULT and not self.training:
            p = 0.0
        return scaled_dot_product_attention(q, k, v, dropout_p=p)


class Block(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4, p=0.1)
        self.feed = nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, width))

    def forward(self, x):
        x = x + self.attention(self.one(x))
        return x + self.feed(self.two(x))


class Parcels(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.score = nn.Linear(6, 24), nn.ModuleList([Block(), Block()]), nn.Linear(24, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.score(x).squeeze(-1)


def shelf(gen):
    x = torch.randn(24, 8, 6, generator=gen)
    return x, (x[..., 0] + x[..., 1]).argmax(1)


@torch.inference_mode()
def validate(model, gen):
    model.eval()
    hits = [(scores.argmax(1) == best).float().mean() for scores, best in ((model(x), y) for x, y in map(shelf, [gen] * 3))]
    model.train()
    return sum(hits) / len(hits)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DDP(Parcels())
    torch.manual_seed(400 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen, losses = torch.Generator().manual_seed(rank), []
    for step in range(72):
        x, best = shelf(gen)
        loss = cross_entropy(model(x), best)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 24 == 23:
            validate(model, torch.Generator().manual_seed(70))
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
