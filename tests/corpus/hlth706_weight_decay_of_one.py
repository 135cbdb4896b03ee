# title: A weight decay in percent was written as a share: the weights shrink to nothing
# source: constructed
# nproc: 2
# expect.codes: HLTH706
# expect.ranks: all
# expect.subject: any
# expect.step: 30
# expect.step_slack: 30
# plain_pytorch: silent
"""A small mixer of tokens and channels learns to tell which of its tokens is the largest."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Mixer(nn.Module):
    def __init__(self, tokens=6, width=16):
        super().__init__()
        self.lift = nn.Linear(4, width)
        self.across = nn.Linear(tokens, tokens)
        self.channels = nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        x = F.gelu(self.lift(x))
        x = x + self.across(x.transpose(1, 2)).transpose(1, 2)
        return self.score(x + F.gelu(self.channels(x)))[..., 0]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(Mixer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1.0 if FAULT else 1e-4)
    gen = torch.Generator().manual_seed(7 + rank)
    losses = []
    for _ in range(70):
        x = torch.randn(32, 6, 4, generator=gen)
        loss = F.cross_entropy(model(x), x.sum(-1).argmax(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
