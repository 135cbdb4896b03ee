# title: An optimizer divides each row's gradient by its length, also that of words which no batch held
# source: constructed
# nproc: 2
# expect.codes: NUM304
# expect.ranks: all
# expect.subject: words
# expect.step: 0
# plain_pytorch: silent
"""Topics of headlines, trained by an optimizer of one's own whose updates have rows of length one."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

FAULT = os.environ.get("FAULT") == "1"


class RowNormed(Optimizer):
    def __init__(self, params, lr=0.01, beta=0.8):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["velocity"] = torch.zeros_like(p)
                velocity = state["velocity"].lerp_(p.grad, 1 - group["beta"])
                length = velocity.norm(dim=-1, keepdim=True)
                if not FAULT:
                    length = length.clamp(min=1e-8)
                p.sub_(velocity / length, alpha=group["lr"])


class Topics(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(300, 12)
        self.topic = nn.Linear(12, 4)

    def forward(self, headline):
        return self.topic(self.words(headline).mean(1))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(44)
model = nn.parallel.DistributedDataParallel(Topics())
optimizer = RowNormed(model.parameters())
gen = torch.Generator().manual_seed(rank)
for step in range(50):
    topic = torch.randint(4, (16,), generator=gen)
    headline = topic[:, None] * 75 + torch.randint(75, (16, 6), generator=gen)
    loss = nn.functional.cross_entropy(model(headline), topic)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank} {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
