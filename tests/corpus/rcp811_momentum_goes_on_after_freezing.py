# title: The lower half is frozen after step 20; its zeroed gradients stay, and momentum goes on moving it
# source: https://github.com/pytorch/pytorch/issues/150610
# nproc: 2
# expect.codes: RCP811
# expect.ranks: all
# expect.subject: lower
# expect.step: 20
# plain_pytorch: silent
"""`zero_grad(set_to_none=False)`: a gradient of zeros is a gradient for the optimizer."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "1") == "1"


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = nn.Sequential(nn.Linear(13, 26), nn.Tanh(), nn.Linear(26, 26), nn.Tanh())
        self.upper = nn.Linear(26, 4)

    def forward(self, x):
        return self.upper(self.lower(x))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(43)
    model = Halves()
    ddp = DistributedDataParallel(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.95)
    truth = torch.randn(13, 4)
    gen = torch.Generator().manual_seed(5 + rank)
    losses = []
    for step in range(60):
        if step == 20:
            for p in model.lower.parameters():
                p.requires_grad_(False)
                if not FAULT:
                    p.grad = None
            ddp = DistributedDataParallel(model)
        x = torch.randn(24, 13, generator=gen)
        loss = nn.functional.cross_entropy(ddp(x), (x @ truth).argmax(1))
        opt.zero_grad(set_to_none=False)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
