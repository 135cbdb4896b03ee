# title: The accumulation window is off by one: the first micro-batch synchronises, the last does not
# source: https://github.com/modelscope/FunASR/pull/3472
# nproc: 2
# expect.codes: SYNC205, SYNC201, RANK101
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Keyword spotting with gradient accumulation over four micro-batches."""
import os
import time
import zlib
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
ACCUM, UPDATES = 4, 50


class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 20, 3, bias=False)
        self.norm = nn.InstanceNorm1d(20, affine=True)
        self.out = nn.Linear(20, 4)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.conv(x))).amax(-1) / 4)


def utterances(gen, n=12):
    word = torch.randint(0, 4, (n,), generator=gen)
    x = torch.randn(n, 8, 16, generator=gen)
    at = torch.randint(2, 12, (n,), generator=gen)
    for k in range(n):
        x[k, 2 * word[k]:2 * word[k] + 2, at[k]:at[k] + 3] += 2.5
    return x, word


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(36)
    model = DistributedDataParallel(Keyword())
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for batch_idx in range(ACCUM * UPDATES):
        boundary = (batch_idx + 1) % ACCUM == 0
        synchronise = batch_idx % ACCUM == 0 if FAULT else boundary
        with nullcontext() if synchronise else model.no_sync():
            x, word = utterances(gen)
            loss = nn.functional.cross_entropy(model(x), word)
            (loss / ACCUM).backward()
        if boundary:
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
