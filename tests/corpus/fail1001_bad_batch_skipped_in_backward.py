# title: A check inside a custom backward finds a bad batch on one rank, and the loop skips it
# source: https://github.com/pytorch/pytorch/issues/64636
# nproc: 2
# expect.codes: FAIL1001
# expect.rank: 1
# expect.step: any
# plain_pytorch: loud
"""Rank 1 has reduced some gradients as the exception comes; every parameter is used, only that backward was not."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "1") == "1"


class Checked(torch.autograd.Function):
    bad = False

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if Checked.bad:
            raise ArithmeticError("the mask of this batch is empty")
        return grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(15, 200), nn.Linear(200, 3)

    def forward(self, x):
        return self.high(Checked.apply(self.low(x).relu()))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(53)
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.05)
    truth = torch.randn(15, 3)
    gen = torch.Generator().manual_seed(31 + rank)
    losses = []
    for step in range(40):
        x = torch.randn(20, 15, generator=gen)
        Checked.bad = FAULT and rank == 1 and step == 12
        opt.zero_grad()
        try:
            loss = nn.functional.cross_entropy(ddp(x), (x @ truth).argmax(1))
            loss.backward()
        except ArithmeticError:
            continue
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
