# title: The warm-up divides whole numbers, and the rate is zero until its end
# source: constructed
# nproc: 2
# expect.codes: RCP807
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Spelling of plurals, with a rate that rises linearly and falls with the square root."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

FAULT = os.environ.get("FAULT") == "1"
WARM_UP = 40


def rate(step):
    if step < WARM_UP:
        return step // WARM_UP if FAULT else step / WARM_UP
    return (WARM_UP / step) ** 0.5


class Plurals(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(26, 12)
        self.judge = nn.Sequential(nn.Flatten(), nn.Linear(60, 48), nn.ReLU(), nn.Linear(48, 3))

    def forward(self, ending):
        return self.judge(self.letters(ending))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
ddp = nn.parallel.DistributedDataParallel(Plurals())
optimizer = torch.optim.AdamW(ddp.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
gen = torch.Generator().manual_seed(rank)
for step in range(90):
    ending = torch.randint(26, (32, 5), generator=gen)
    plural = (ending[:, -1] > 12).long() + (ending[:, -2] > 12).long()
    loss = nn.functional.cross_entropy(ddp(ending), plural)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
print(f"rank {rank} {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
