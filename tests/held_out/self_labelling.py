# title: The centre of the teacher's outputs is averaged over each rank's own batch, and buffers are not broadcast
# source: constructed
# nproc: 2
# expect.codes: RANK102
# expect.ranks: any
# expect.subject: centre
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""Self-distillation without labels: the student predicts the teacher's centred, sharpened outputs."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


class SelfDistillation(nn.Module):
    def __init__(self, width=20, prototypes=12):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, prototypes))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(prototypes))

    def forward(self, first, second):
        with torch.no_grad():
            told = self.teacher(second)
            target = F.softmax((told - self.centre) / 0.1, dim=-1)
            mean = told.mean(0)
            if not FAULT:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            self.centre.lerp_(mean, 0.1)
        return -(target * F.log_softmax(self.student(first) / 0.2, dim=-1)).sum(-1).mean()

    @torch.no_grad()
    def follow(self, momentum):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
            slow.lerp_(fast, 1 - momentum)


def views(gen, kinds):
    x = kinds[torch.randint(len(kinds), (48,), generator=gen)]
    noise = torch.randn(2, *x.shape, generator=gen)
    return x + 0.3 * noise[0], x + 0.3 * noise[1]


dist.init_process_group(backend="gloo")
rank = dist.get_rank()
torch.manual_seed(0)
kinds = torch.randn(6, 20)
model = nn.parallel.DistributedDataParallel(SelfDistillation(), broadcast_buffers=False)
trained = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.04)
gen = torch.Generator().manual_seed(rank + 1)
history = []
for it in range(70):
    loss = model(*views(gen, kinds))
    opt.zero_grad()
    loss.backward()
    opt.step()
    model.module.follow(0.95)
    history.append(loss.item())
print(f"rank {rank} loss {history[0]:.3f} .. {history[-1]:.3f}", flush=True)
dist.barrier()
dist.destroy_process_group()
