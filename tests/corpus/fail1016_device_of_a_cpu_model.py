# title: A script for GPUs passes device_ids, and the model was never moved off the CPU
# source: https://github.com/pytorch/pytorch/issues/100243
# nproc: 2
# expect.codes: FAIL1016
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: error
"""Sorts short time series by their trend; `device_ids` is only right for a model on that device."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Trend(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv1d(1, 12, 5, padding=2)
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.filters(x[:, None])).mean(2))


def batch(gen):
    slope = torch.randint(0, 3, (48,), generator=gen)
    line = torch.linspace(-1, 1, 20) * (slope - 1)[:, None]
    return line + 0.3 * torch.randn(48, 20, generator=gen), slope


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    net = Trend()
    model = DDP(net, device_ids=[0]) if FAULT else DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(70 + rank)
    curve = []
    for _ in range(60):
        x, slope = batch(gen)
        loss = nn.functional.cross_entropy(model(x), slope)
        opt.zero_grad()
        loss.backward()
        opt.step()
        curve.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
