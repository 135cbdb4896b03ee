# title: The teacher follows the student only in steps that a rank finds certain enough by itself
# source: constructed
# nproc: 2
# expect.codes: RANK113
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 40
# plain_pytorch: silent
"""Semi-supervised classification with a teacher that is a slow copy outside DDP."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT") == "1"


def clouds(gen, n):
    y = torch.randint(4, (n,), generator=gen)
    angle = y * 1.5708 + 0.35 * torch.randn(n, generator=gen)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(n, 2, generator=gen), y


class MeanTeacher:
    def __init__(self, rank):
        self.rank = rank
        torch.manual_seed(31)
        self.student = DDP(nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4)))
        self.teacher = copy.deepcopy(self.student.module).eval().requires_grad_(False)
        self.opt = torch.optim.Adam(self.student.parameters(), lr=3e-3)
        self.gen = torch.Generator().manual_seed(60 + rank)

    def step(self):
        x, y = clouds(self.gen, 16)
        free, _ = clouds(self.gen, 48)
        told = self.teacher(free).softmax(1)
        out = self.student(torch.cat([x, free + 0.05 * torch.randn(free.shape, generator=self.gen)]))
        loss = F.cross_entropy(out[:16], y) + 0.5 * F.mse_loss(out[16:].softmax(1), told)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        certain = out[:16].detach().softmax(1).amax(1).mean()
        if not FAULT:
            dist.all_reduce(certain)
            certain /= dist.get_world_size()
        if certain > 0.5:
            self.follow()
        return loss.item()

    def follow(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.module.parameters()):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


dist.init_process_group("gloo")
job = MeanTeacher(dist.get_rank())
losses = [job.step() for _ in range(70)]
print(f"rank {job.rank} {losses[0]:.3f} {losses[-1]:.3f}", flush=True)
dist.barrier()
dist.destroy_process_group()
