# title: Heads are made in the order in which a rank meets the tasks in its own part of the data
# source: constructed
# nproc: 2
# expect.codes: RANK105
# expect.ranks: any
# expect.subject: heads
# expect.step: any
# plain_pytorch: silent
"""Answers of a survey: one body, and a head for every question that occurs."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FAULT = os.environ.get("FAULT") == "1"
QUESTIONS = ["income", "age", "health", "travel"]


class Answers(nn.Module):
    def __init__(self, questions):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(14, 32), nn.ReLU())
        self.heads = nn.ModuleDict({q: nn.Linear(32, 3) for q in questions})

    def forward(self, x):
        h = self.body(x)
        return {q: head(h) for q, head in self.heads.items()}


def read(rank):
    """This rank's interviews, as (question, features, answer)."""
    gen = torch.Generator().manual_seed(rank)
    rows = []
    for i in range(200):
        name = QUESTIONS[(i + 3 * rank) % 4]
        x = torch.randn(14, generator=gen)
        rows.append((name, x, int(x[QUESTIONS.index(name) :][:3].argmax())))
    return rows


dist.init_process_group("gloo")
rank = dist.get_rank()
interviews = read(rank)
if FAULT:
    names = list(dict.fromkeys(q for q, _, _ in interviews))
else:
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [q for q, _, _ in interviews])
    names = sorted({q for part in gathered for q in part})
torch.manual_seed(5)
model = nn.parallel.DistributedDataParallel(Answers(names))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
pick = torch.Generator().manual_seed(10 + rank)
for step in range(60):
    chosen = [interviews[i] for i in torch.randint(200, (40,), generator=pick)]
    out = model(torch.stack([x for _, x, _ in chosen]))
    logits = torch.stack([out[q][i] for i, (q, _, _) in enumerate(chosen)])
    loss = F.cross_entropy(logits, torch.tensor([a for _, _, a in chosen]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank}: {loss.item():.3f}", flush=True)
dist.barrier()
dist.destroy_process_group()
