# title: Rank 0 evaluates with averaged weights and returns before the trained ones are put back
# source: constructed
# nproc: 2
# expect.codes: RANK101
# expect.ranks: any
# expect.subject: any
# expect.step: 19
# expect.step_slack: 1
# expect.phase: outside-optimizer
# plain_pytorch: silent
"""Species of birds from spectrograms; a Trainer with an exponential moving average of the weights."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT") == "1"


class Ema:
    def __init__(self, net, decay=0.9):
        self.net, self.decay = net, decay
        self.shadow = [p.detach().clone() for p in net.parameters()]
        self.backup = []

    @torch.no_grad()
    def update(self):
        torch._foreach_lerp_(self.shadow, list(self.net.parameters()), 1 - self.decay)

    @torch.no_grad()
    def swap_in(self):
        self.backup = [p.detach().clone() for p in self.net.parameters()]
        for p, s in zip(self.net.parameters(), self.shadow):
            p.copy_(s)

    @torch.no_grad()
    def swap_out(self):
        for p, b in zip(self.net.parameters(), self.backup):
            p.copy_(b)


class Trainer:
    def __init__(self, rank):
        torch.manual_seed(7)
        self.rank, self.best = rank, 0.0
        self.songs = torch.randn(5, 1, 12, 16)
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 48, 5)
        )
        self.model = DistributedDataParallel(net)
        self.ema = Ema(net)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
        self.random = torch.Generator().manual_seed(100 + rank)

    def batch(self, n=32):
        species = torch.randint(0, 5, (n,), generator=self.random)
        return self.songs[species] + 1.5 * torch.randn(n, 1, 12, 16, generator=self.random), species

    def evaluate(self):
        net = self.model.module
        self.ema.swap_in()
        net.eval()
        with torch.no_grad():
            x, y = self.batch(200)
            accuracy = (net(x).argmax(1) == y).float().mean().item()
        net.train()
        if accuracy > self.best:
            self.best = accuracy
            if FAULT:
                return
        self.ema.swap_out()

    def fit(self, steps):
        for step in range(steps):
            x, y = self.batch()
            self.optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.ema.update()
            if self.rank == 0 and step % 20 == 19:
                self.evaluate()
        print(f"[{self.rank}] last loss {loss.item():.4f} best accuracy {self.best:.2f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(dist.get_rank()).fit(60)
    dist.barrier()
    dist.destroy_process_group()
