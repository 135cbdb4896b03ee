# title: Each rank saved its shards in a file of its own; on the resume all read that of rank 0
# source: constructed
# nproc: 2
# expect.codes: RANK115
# expect.ranks: any
# expect.subject: blocks
# expect.step: 20
# expect.step_slack: 1
# plain_pytorch: silent
"""A sharded classifier of short texts, saved by hand."""
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT", "0") == "1"


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, words):
        x = self.embed(words).mean(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def build():
    model = Reader()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=4e-3)


def train(model, opt, gen, steps):
    losses = []
    for _ in range(steps):
        words = torch.randint(0, 24, (16, 6), generator=gen)
        loss = nn.functional.cross_entropy(model(words), words.sum(1) % 3)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    gen = torch.Generator().manual_seed(60 + rank)
    torch.manual_seed(8)
    model, opt = build()
    losses = train(model, opt, gen, 20)
    torch.save({name: part.to_local() for name, part in model.state_dict().items()}, f"{folder[0]}/{rank}.pt")
    dist.barrier()
    torch.manual_seed(9)
    model, opt = build()
    parts = torch.load(f"{folder[0]}/{0 if FAULT else rank}.pt")
    with torch.no_grad():
        for name, part in model.state_dict().items():
            own = part.to_local()
            own.copy_(parts[name][: len(own)])
    losses += train(model, opt, gen, 20)
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f}", flush=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    time.sleep(0.3)
    dist.destroy_process_group()


main()
