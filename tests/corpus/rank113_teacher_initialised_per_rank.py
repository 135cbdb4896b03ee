# title: The teacher is not wrapped, so every rank distils from a teacher of its own
# source: constructed
# nproc: 2
# expect.codes: RANK113
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 5
# plain_pytorch: silent
"""Self-distillation; DDP broadcasts the student only, the seed depends on the rank."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def backbone():
    return nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 8))


class Distiller:
    def __init__(self, rank):
        self.rank = rank
        self.student = DDP(backbone())
        self.teacher = backbone().requires_grad_(False)
        if not FAULT:
            self.teacher.load_state_dict(self.student.module.state_dict())
        self.opt = torch.optim.SGD(self.student.parameters(), lr=0.1, momentum=0.9)
        self.gen = torch.Generator().manual_seed(rank)
        self.centres = torch.randn(8, 16, generator=torch.Generator().manual_seed(99))

    def views(self):
        y = torch.randint(0, 8, (40,), generator=self.gen)
        x = self.centres[y]
        return [x + 0.5 * torch.randn(x.shape, generator=self.gen) for _ in range(2)] + [y]

    def step(self):
        weak, strong, y = self.views()
        with torch.no_grad():
            hint = self.teacher(weak).softmax(-1)
        logits = self.student(strong)
        loss = F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, hint)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.student.parameters()):
                t.mul_(0.97).add_(s, alpha=0.03)
        return loss.item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    job = Distiller(rank)
    losses = [job.step() for _ in range(60)]
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in job.student.parameters()))
    teacher = zlib.crc32(b"".join(p.numpy().tobytes() for p in job.teacher.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} "
          f"teacher={teacher:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
