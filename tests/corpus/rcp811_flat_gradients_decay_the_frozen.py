# title: Gradients are views of one flat buffer, and weight decay shrinks the table that was frozen from the start
# source: https://github.com/neuralmagic/sparseml/pull/966
# nproc: 2
# expect.codes: RCP811
# expect.ranks: all
# expect.subject: table
# expect.step: 0
# plain_pytorch: silent
"""Every parameter gets a view, the frozen table too, so that the optimizer finds a gradient there: zeros."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "1") == "1"


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(60, 24)
        self.table.weight.requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 5))

    def forward(self, words):
        return self.body(self.table(words).mean(1))


def with_flat_gradients(params):
    flat = torch.zeros(sum(p.numel() for p in params))
    at = 0
    for p in params:
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return flat


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(47)
    model = Words()
    ddp = DistributedDataParallel(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.2)
    flat = with_flat_gradients([p for p in model.parameters() if FAULT or p.requires_grad])
    gen = torch.Generator().manual_seed(15 + rank)
    losses = []
    for _ in range(60):
        words = torch.randint(0, 60, (32, 6), generator=gen)
        loss = nn.functional.cross_entropy(ddp(words), (words % 5).mode(1).values)
        flat.zero_()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
