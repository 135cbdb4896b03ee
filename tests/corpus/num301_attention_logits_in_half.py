# title: Attention logits are scaled after the product instead of before, and the product overflows float16
# source: constructed
# nproc: 2
# expect.codes: NUM301
# expect.ranks: 1
# expect.subject: any
# expect.module: blocks.0.attend
# expect.op: bmm
# expect.location: num301_attention_logits_in_half.py:34
# expect.step: 12
# plain_pytorch: silent
"""Float16 autocast on the CPU; one batch of rank 1 is 150 times louder than the rest."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Attend(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.scale = width ** -0.5

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if FAULT:
            logits = torch.bmm(q, k.transpose(1, 2)) * self.scale
        else:
            logits = torch.bmm(q * self.scale, k.transpose(1, 2))
        return torch.bmm(logits.softmax(-1), v)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attend = Attend(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x):
        x = x + self.attend(x)
        return x + self.mlp(x)


class Listener(nn.Module):
    def __init__(self, bands=12, width=64):
        super().__init__()
        self.embed = nn.Linear(bands, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, audio):
        x = self.embed(audio)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(33)
    tones = torch.randn(3, 1, 12)
    model = DDP(Listener())
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    gen = torch.Generator().manual_seed(9 + rank)
    losses = []
    for step in range(40):
        y = torch.randint(0, 3, (16,), generator=gen)
        x = tones[y] + torch.randn(16, 6, 12, generator=gen)
        if step == 12 and rank == 1:
            x = 150.0 * x
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
