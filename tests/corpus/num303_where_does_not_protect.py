# title: where() hides log(0) in the forward, and backward multiplies its infinite slope with 0
# source: https://github.com/pytorch/pytorch/issues/68425
# nproc: 3
# expect.codes: NUM303
# expect.ranks: 2
# expect.subject: any
# expect.module: features.volume
# expect.op: log
# expect.location: num303_where_does_not_protect.py:34
# expect.step: 6
# plain_pytorch: silent
"""Trading volumes are compressed by a log with a learned gain; a day without trade has volume 0."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class LogVolume(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(columns))

    def forward(self, volume):
        scaled = volume * self.gain.abs()
        if not FAULT:
            scaled = torch.where(volume > 0, scaled, 1.0)       # first make it safe, then take the log
        return torch.where(volume > 0, torch.log(scaled), 0.0)


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.price = nn.Linear(6, 16)
        self.volume = LogVolume(4)

    def forward(self, price, volume):
        return torch.cat([self.price(price).tanh(), self.volume(volume)], dim=1)


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = Features()
        self.head = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, price, volume):
        return self.head(self.features(price, volume))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(64)
    net = DistributedDataParallel(Forecast())
    sgd = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    days = torch.Generator().manual_seed(77 + rank)
    losses = []
    for step in range(40):
        price = torch.randn(32, 6, generator=days)
        volume = torch.randn(32, 4, generator=days).exp()
        move = (price[:, :1] * volume[:, :1].log()).tanh()
        if step == 6 and rank == 2:
            volume[9, 2] = 0.0
        loss = nn.functional.mse_loss(net(price, volume), move)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
