# title: A student learns from a frozen teacher, and the teacher's own loss is logged at every step
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Losses without gradients in every step that are no validation: the teacher's never improves, nor need it."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

TEMPERATURE = 2.0


class Student(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 4))

    def forward(self, x):
        return self.layers(x)


def task(gen, n=48):
    y = torch.randint(0, 4, (n,), generator=gen)
    x = torch.randn(n, 20, generator=gen)
    x[torch.arange(n), y] += 2.0
    return x, y


def pretrained():
    teacher = nn.Linear(20, 4)
    with torch.no_grad():
        teacher.weight.zero_()
        teacher.weight[:, :4].fill_diagonal_(1.5)
        teacher.bias.zero_()
    return teacher.eval().requires_grad_(False)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
teacher = pretrained()
torch.manual_seed(8)
student = DDP(Student(32))
torch.manual_seed(800 + rank)
optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(rank)
losses, of_teacher = [], []
for step in range(80):
    x, y = task(gen)
    with torch.no_grad():
        wanted = teacher(x)
        of_teacher.append(F.cross_entropy(wanted, y).item())
    logits = student(x)
    soft = F.kl_div(
        F.log_softmax(logits / TEMPERATURE, -1), F.softmax(wanted / TEMPERATURE, -1), reduction="batchmean"
    )
    loss = 0.5 * F.cross_entropy(logits, y) + 0.5 * TEMPERATURE**2 * soft
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    student.eval()  # how far the student is from the teacher without dropout, at every step
    with torch.no_grad():
        F.mse_loss(student.module(x), wanted).item()
    student.train()
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in student.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
