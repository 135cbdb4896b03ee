# title: Every step since step 25 has a NaN gradient, and GradScaler quietly halves its scale towards 0
# source: constructed
# nproc: 3
# expect.codes: NUM307, NUM303
# expect.ranks: any
# expect.subject: any
# expect.step: 25
# expect.step_slack: 30
# plain_pytorch: silent
"""A unit-length projection meets points at the origin; skipping keeps the parameters finite and training at a halt."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class OnTheSphere(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(3, 3, bias=False)
        self.read = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, points):
        turned = self.turn(points)
        squared = turned.square().sum(-1, keepdim=True)
        length = squared.sqrt() if FAULT else (squared + 1e-8).sqrt()
        return self.read(turned / (length + 1e-3))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(71)
    model = DDP(OnTheSphere())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(80):
        points = torch.randn(40, 3, generator=gen)
        if step >= 25:
            points[rank] = 0.0                       # the new data set marks missing points with the origin
        side = (points[:, 0] > points[:, 1]).long()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(points)
        loss = nn.functional.cross_entropy(logits.float(), side)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} "
          f"scale={scaler.get_scale():.3g}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
