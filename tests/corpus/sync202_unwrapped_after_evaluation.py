# title: Evaluation unwraps the model and training goes on with the raw module
# source: constructed
# nproc: 4
# expect.codes: SYNC202, SYNC201, RANK101
# expect.ranks: all
# expect.subject: any
# expect.step: 20
# plain_pytorch: silent
"""A trainer whose evaluate() overwrites self.model with the inner module."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Trainer:
    eval_every = 20

    def __init__(self, rank):
        torch.manual_seed(50)
        self.rule = torch.randn(10)
        self.rank = rank
        self.model = DistributedDataParallel(
            nn.Sequential(nn.Linear(10, 32), nn.Hardswish(), nn.Linear(32, 16), nn.Hardswish(), nn.Linear(16, 1)))
        self.wrapped = self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.gen = torch.Generator().manual_seed(rank)
        self.curve = []

    def batch(self, gen, n=32):
        x = torch.randn(n, 10, generator=gen)
        return x, (x @ self.rule > 0).float()

    def evaluate(self):
        inner = self.model.module if hasattr(self.model, "module") else self.model
        inner.eval()
        with torch.no_grad():
            x, y = self.batch(torch.Generator().manual_seed(4321), 128)
            hits = ((inner(x).squeeze(1) > 0) == y.bool()).float().mean().item()
        inner.train()
        if FAULT:
            self.model = inner
        return hits

    def train_step(self):
        x, y = self.batch(self.gen)
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(x).squeeze(1), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.curve.append(loss.item())

    def fit(self, steps):
        for step in range(steps):
            if step and step % self.eval_every == 0:
                hits = self.evaluate()
                if self.rank == 0:
                    print(f"step {step}: {hits:.3f} correct", flush=True)
            self.train_step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Trainer(dist.get_rank())
    job.fit(60)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in job.wrapped.parameters()))
    print(f"RESULT rank={job.rank} first={job.curve[0]:.4f} final={sum(job.curve[-5:]) / 5:.4f} crc={crc:08x}",
          flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
