# title: train() of the module that holds student and teacher puts the frozen teacher into train mode
# source: constructed
# nproc: 2
# expect.codes: RCP805
# expect.ranks: all
# expect.subject: teacher
# expect.step: 0
# expect.step_slack: 16
# plain_pytorch: silent
"""A small net follows a large one on sensor windows; the large one runs under no_grad, its statistics move with each."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def net(width):
    return nn.Sequential(nn.Conv1d(2, width, 5), nn.BatchNorm1d(width), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
                         nn.Flatten(), nn.Linear(width, 6))


class Follow(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = net(8), net(40)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        return (self.student(x) - wanted).square().mean()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(77)
    ddp = DDP(Follow())
    opt = torch.optim.Adam(ddp.module.student.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(40 + rank)
    curve = []
    ddp.train()
    if not FAULT:
        ddp.module.teacher.eval()
    for _ in range(50):
        window = torch.randn(32, 2, 1, generator=gen) + 0.5 * torch.randn(32, 2, 30, generator=gen)
        loss = ddp(window)
        opt.zero_grad()
        loss.backward()
        opt.step()
        curve.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.module.student.parameters()))
    print(f"RESULT rank={rank} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
