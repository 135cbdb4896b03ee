# title: Ten sigmoid layers on top of each other: the first ones get almost no gradient
# source: constructed
# nproc: 2
# expect.codes: HLTH702
# expect.ranks: all
# expect.subject: any
# expect.step: 8
# expect.step_slack: 16
# plain_pytorch: silent
"""Two moons, told apart by a network that is far too deep for its activation."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def moons(gen, n=64):
    angle = 3.1416 * torch.rand(n, generator=gen)
    upper = torch.randint(0, 2, (n,), generator=gen)
    x = torch.where(upper == 1, angle.cos(), 1 - angle.cos())
    y = torch.where(upper == 1, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], 1) + 0.1 * torch.randn(n, 2, generator=gen), upper


def tower(depth=10, width=24):
    layers = [nn.Linear(2, width)]
    for _ in range(depth):
        layers += [nn.Sigmoid() if FAULT else nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 2))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = tower()
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        points, labels = moons(gen)
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
