# title: A rollback to the best checkpoint is done by the main process only
# source: constructed
# nproc: 3
# expect.codes: RANK101
# expect.ranks: 0
# expect.subject: encoder
# expect.step: 36
# expect.step_slack: 1
# expect.phase: load, outside-optimizer
# plain_pytorch: silent
"""A trainer class that keeps its best state in memory and returns to it when the learning rate drops."""
import io
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Gestures(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(6, 28, batch_first=True)
        self.readout = nn.Linear(28, 3)

    def forward(self, x):
        return self.readout(self.encoder(x)[0][:, -1])


class Trainer:
    def __init__(self):
        self.rank = dist.get_rank()
        torch.manual_seed(12)
        self.model = DistributedDataParallel(Gestures())
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.rng = torch.Generator().manual_seed(31 * self.rank + 1)
        self.losses = []

    def batch(self):
        y = torch.randint(0, 3, (32,), generator=self.rng)
        t = torch.linspace(0, 1, 10)[None, :, None]
        phase = torch.rand(32, 1, 6, generator=self.rng)
        x = torch.sin(6.28 * ((y[:, None, None] + 1) * t + 0.3 * phase))
        return x + 0.2 * torch.randn(x.shape, generator=self.rng), y

    def train_epoch(self, steps=12):
        for _ in range(steps):
            x, y = self.batch()
            self.optim.zero_grad()
            loss = cross_entropy(self.model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optim.step()
            self.losses.append(loss.item())

    def save(self):
        blob = io.BytesIO()
        torch.save(self.model.state_dict(), blob)
        return blob.getvalue()

    def rollback(self, blob):
        if FAULT and self.rank != 0:
            return
        self.model.load_state_dict(torch.load(io.BytesIO(blob)))

    def fit(self):
        for epoch in range(5):
            if epoch == 2:
                best = self.save()
            if epoch == 3:
                self.rollback(best)
                for group in self.optim.param_groups:
                    group["lr"] *= 0.5
            self.train_epoch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Trainer()
    job.fit()
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in job.model.parameters()))
    first, final = job.losses[0], sum(job.losses[-5:]) / 5
    print(f"RESULT rank={job.rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
