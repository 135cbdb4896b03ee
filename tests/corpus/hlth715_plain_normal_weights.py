# title: All weights are drawn from a normal distribution of deviation 1, whatever their fan
# source: constructed
# nproc: 2
# expect.codes: HLTH715
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 0
# plain_pytorch: silent
"""Classification by a plain deep network, initialised by hand."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def initialise(layer):
    if isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=1.0 if FAULT else layer.in_features**-0.5)
        nn.init.zeros_(layer.bias)


def network(width=48, depth=5):
    layers = [nn.Linear(12, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 3)).apply(initialise)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        x = torch.randn(48, 12, generator=gen)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
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
