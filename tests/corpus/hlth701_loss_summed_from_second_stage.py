# title: In the second stage of a curriculum the loss is a sum over the tokens instead of their mean
# source: constructed
# nproc: 2
# expect.codes: HLTH701
# expect.ranks: all
# expect.subject: any
# expect.step: 25
# expect.step_slack: 6
# plain_pytorch: silent
"""Next-symbol prediction on noisy counters; long sequences come in after 25 steps."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"

VOCABULARY = 12


def counters(gen, length, n=16):
    start = torch.randint(0, VOCABULARY, (n, 1), generator=gen)
    stride = torch.randint(1, 4, (n, 1), generator=gen)
    return (start + stride * torch.arange(length + 1)) % VOCABULARY


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.symbols = nn.Embedding(VOCABULARY, 24)
        self.memory = nn.GRU(24, 48, batch_first=True)
        self.guess = nn.Linear(48, VOCABULARY)

    def forward(self, tokens):
        states, _ = self.memory(self.symbols(tokens))
        return self.guess(states)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(Reader())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(50):
        long = step >= 25
        text = counters(gen, 32 if long else 12)
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum" if long and FAULT else "mean")
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
