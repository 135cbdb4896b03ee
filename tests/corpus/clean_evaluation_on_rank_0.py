# title: Rank 0 evaluates the inner module while the others wait at a barrier
# source: constructed
# nproc: 3
# expect.codes: none
# plain_pytorch: silent
"""Eval mode on one rank only, for a moment, with forwards of the raw module and without gradients."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 12, 5, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1))
        self.fc = nn.Linear(12, 2)

    def forward(self, x):
        return self.fc(self.body(x).mean(-1))


class Run:
    def __init__(self):
        self.rank = dist.get_rank()
        torch.manual_seed(3)
        self.model = DDP(Convolutional())
        torch.manual_seed(300 + self.rank)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.gen = torch.Generator().manual_seed(self.rank)

    def batch(self, gen, n=24):
        y = torch.randint(0, 2, (n,), generator=gen)
        t = torch.arange(20.0)
        x = torch.sin((0.4 + 0.5 * y[:, None, None]) * t + 6.28 * torch.rand(n, 2, 1, generator=gen))
        return x + 0.4 * torch.randn(n, 2, 20, generator=gen), y

    def evaluate(self):
        net = self.model.module
        net.eval()
        with torch.no_grad():
            x, y = self.batch(torch.Generator().manual_seed(999), 96)
            hits = (net(x).argmax(1) == y).float().mean().item()
        net.train()
        return hits

    def fit(self):
        losses = []
        for step in range(60):
            x, y = self.batch(self.gen)
            self.opt.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.opt.step()
            losses.append(loss.item())
            if step % 15 == 14:
                if self.rank == 0:
                    print(f"step {step}: {self.evaluate():.3f}", flush=True)
                dist.barrier()
        return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run = Run()
    losses = run.fit()
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in run.model.parameters()))
    print(f"RESULT rank={run.rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
