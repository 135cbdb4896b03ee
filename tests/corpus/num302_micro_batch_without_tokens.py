# title: The loss of a micro-batch is divided by its number of target tokens, and one micro-batch has none
# source: constructed
# nproc: 2
# expect.codes: NUM302
# expect.ranks: 1
# expect.subject: any
# expect.op: div
# expect.location: num302_micro_batch_without_tokens.py:43
# expect.step: 7
# plain_pytorch: silent
"""Gradient accumulation over four micro-batches with no_sync; the second of step 7 is prompt only, on rank 1."""
import contextlib
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
VOCABULARY, MICRO = 30, 4


class Tongue(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.next = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        return self.next(self.memory(self.token(ids))[0])


def answers_only(logits, target, keep):
    nats = F.cross_entropy(logits.transpose(1, 2), target, reduction="none") * keep
    tokens = keep.sum()
    if not FAULT:
        tokens = tokens.clamp_min(1.0)
    return nats.sum() / tokens


def dialogue(gen, n=8, length=10):
    start = torch.randint(0, VOCABULARY, (n, 1), generator=gen)
    ids = (start + 3 * torch.arange(length + 1)) % VOCABULARY
    prompt = torch.randint(2, 6, (n, 1), generator=gen)
    return ids[:, :-1], ids[:, 1:], (torch.arange(length) >= prompt).float()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(Tongue())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(25):
        opt.zero_grad()
        total = 0.0
        for micro in range(MICRO):
            ids, target, keep = dialogue(gen)
            if (step, micro, rank) == (7, 1, 1):
                keep = torch.zeros_like(keep)
            last = micro == MICRO - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = answers_only(model(ids), target, keep) / MICRO
                loss.backward()
            total += loss.item()
        opt.step()
        losses.append(total)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
