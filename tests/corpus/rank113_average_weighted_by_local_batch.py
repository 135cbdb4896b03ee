# title: The averaged (EMA) copy uses a decay that depends on the size of each rank's batch
# source: constructed
# nproc: 3
# expect.codes: RANK113
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 5
# plain_pytorch: silent
"""The trained parameters agree; the copy that is evaluated and saved differs on every rank."""
import copy
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Averaged:
    """Keeps a slowly moving copy of a model."""

    def __init__(self, model, decay=0.9):
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model, weight=1.0):
        keep = self.decay**weight
        for slow, fast in zip(self.module.parameters(), model.parameters()):
            slow.lerp_(fast, 1 - keep)


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.all = nn.Linear(32, 2)

    def forward(self, cloud):
        return self.all(self.each(cloud).amax(1))


def clouds(g, n):
    y = torch.randint(0, 2, (n,), generator=g)
    p = torch.randn(n, 24, 3, generator=g)
    p = torch.where(y[:, None, None] == 1, p / p.norm(dim=-1, keepdim=True), p.clamp(-1, 1))
    return p, y


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(19)
    net = PointNet()
    ema = Averaged(net)
    model = DistributedDataParallel(net)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    g = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        size = int(torch.randint(24, 40, (1,), generator=g))
        cloud, y = clouds(g, size)
        loss = nn.functional.cross_entropy(model(cloud), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(net, weight=size / 32 if FAULT else 1.0)
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    slow = zlib.crc32(b"".join(p.numpy().tobytes() for p in ema.module.parameters()))
    with torch.no_grad():
        cloud, y = clouds(torch.Generator().manual_seed(77), 64)
        accuracy = (ema.module(cloud).argmax(1) == y).float().mean().item()
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} "
          f"ema={slow:08x} accuracy={accuracy:.3f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
