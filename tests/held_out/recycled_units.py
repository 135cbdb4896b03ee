# title: The moments of rarely used units are reset by each rank's own count of their use
# source: constructed
# nproc: 2
# expect.codes: RANK103, RANK101
# expect.ranks: any
# expect.subject: any
# expect.step: 24
# expect.step_slack: 1
# plain_pytorch: silent
"""Continual regression in which the least used hidden units get fresh Adam moments now and then."""
import os

import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT") == "1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(10, 40)
        self.outer = nn.Linear(40, 2)
        self.used = None

    def forward(self, x):
        hidden = torch.relu(self.inner(x))
        self.used = (hidden > 0).float().mean(0).detach()
        return self.outer(hidden)


def recycle(net, optimizer, usage, k=6):
    """Forget the moments of the k units that were active least."""
    usage = usage.clone()
    if not FAULT:
        dist.all_reduce(usage)
    least = usage.topk(k, largest=False).indices
    state = optimizer.state[net.inner.weight]
    for key in ("exp_avg", "exp_avg_sq"):
        state[key][least] = state[key].mean()


def run():
    rank = dist.get_rank()
    torch.manual_seed(3)
    teacher = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2)).requires_grad_(False)
    net = Net()
    ddp = DDP(net)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(50 + rank)
    usage = torch.zeros(40)
    total = 0.0
    for step in range(75):
        x = torch.randn(32, 10, generator=gen) + 0.5 * rank
        loss = (ddp(x) - teacher(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        usage = 0.9 * usage + 0.1 * net.used
        total += loss.item()
        if (step + 1) % 25 == 0:
            recycle(net, optimizer, usage)
    print("rank", rank, "mean loss", round(total / 75, 4), flush=True)


dist.init_process_group("gloo")
run()
dist.barrier()
dist.destroy_process_group()
