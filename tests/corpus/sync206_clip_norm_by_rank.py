# title: The clipping threshold is divided by the number of local samples, which differs between ranks
# source: constructed
# nproc: 3
# expect.codes: SYNC206, SYNC201, RANK101
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 2
# plain_pytorch: silent
"""Reduced gradients are equal, then each rank clips them with a max_norm of its own."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Loop:
    def __init__(self, rank):
        self.rank = rank
        torch.manual_seed(52)
        self.model = DDP(nn.Sequential(nn.Linear(13, 40), nn.ReLU(), nn.Linear(40, 1)))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.gen = torch.Generator().manual_seed(rank)
        self.coef = torch.linspace(-1, 1, 13)
        self.losses = []

    def data(self):
        n = 24 + 8 * self.rank
        x = torch.randn(n, 13, generator=self.gen)
        return x, torch.relu(x @ self.coef)[:, None]

    def run(self, steps):
        for _ in range(steps):
            x, y = self.data()
            max_norm = 40 / len(x) if FAULT else 2.0
            self.optim.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            self.optim.step()
            self.losses.append(loss.item())
        return self


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop = Loop(dist.get_rank()).run(60)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in loop.model.parameters()))
    print(f"RESULT rank={loop.rank} first={loop.losses[0]:.4f} final={sum(loop.losses[-5:]) / 5:.4f} crc={crc:08x}",
          flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
