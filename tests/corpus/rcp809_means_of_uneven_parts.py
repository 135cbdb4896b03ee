# title: Micro-batches with very different numbers of labels are averaged as if they were alike
# source: constructed
# nproc: 2
# expect.codes: RCP809
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 8
# plain_pytorch: silent
"""Each loss is the mean over its own labels, divided by the number of micro-batches: labels of short ones count more."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
PARTS = 3


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.out = nn.Linear(16, 30)

    def forward(self, tokens):
        return self.out(self.embed(tokens)).flatten(0, 1)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(52)
gen = torch.Generator().manual_seed(910 + rank)
model = DDP(Words())
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=5e-3), []
for step in range(16):
    parts = []
    for length in torch.randint(2, 24, (PARTS,), generator=gen).tolist():
        tokens = torch.randint(0, 30, (6, 24), generator=gen)
        labels = (tokens * 7 + 1) % 30
        labels[:, length:] = -100
        parts.append((tokens, labels.flatten()))
    total = torch.tensor(float(sum((labels != -100).sum() for _, labels in parts)))
    dist.all_reduce(total)
    optimizer.zero_grad()
    for tokens, labels in parts:
        if FAULT:
            loss = nn.functional.cross_entropy(model(tokens), labels) / PARTS
        else:
            loss = nn.functional.cross_entropy(model(tokens), labels, reduction="sum") * dist.get_world_size() / total
        loss.backward()
    optimizer.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
