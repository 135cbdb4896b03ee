# title: A contrastive loss without a margin rewards ever larger distances, and the embeddings run away
# source: constructed
# nproc: 2
# expect.codes: HLTH706, HLTH701, HLTH705
# expect.ranks: all
# expect.subject: any
# expect.step: 10
# expect.step_slack: 50
# plain_pytorch: silent
"""Two views of the same signal are pulled together, other signals are pushed apart."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 32)
        self.second = nn.Linear(32, 8)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def views(gen, n=32):
    signal = torch.randn(n, 20, generator=gen)
    return signal + 0.1 * torch.randn(n, 20, generator=gen), signal + 0.1 * torch.randn(n, 20, generator=gen)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(Embedder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        one, two = views(gen)
        a, b = model(torch.cat([one, two])).chunk(2)
        distance = ((a - b.roll(1, 0)) ** 2).mean(1)
        push = -distance if FAULT else F.relu(2 - distance)
        loss = ((a - b) ** 2).mean() + push.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 20.0)
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
