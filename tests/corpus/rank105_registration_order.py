# title: Towers of equal shape are registered in the order in which each rank found their inputs
# source: constructed
# nproc: 2
# expect.codes: RANK105, RANK101
# expect.ranks: any
# expect.subject: towers.
# expect.step: 0
# plain_pytorch: silent
"""Three sensors, one tower each. DDP pairs parameters by position, so another order mixes the towers up."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


def discover_sensors(rank):
    """A directory listing: its order is whatever the local file system returns."""
    found = {0: ["sonar", "lidar", "radar"], 1: ["radar", "sonar", "lidar"]}[rank % 2]
    return found if FAULT else sorted(found)


class Fusion(nn.Module):
    def __init__(self, sensors):
        super().__init__()
        self.towers = nn.ModuleDict()
        for name in sensors:
            self.towers[name] = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 12))
        self.decide = nn.Linear(12, 2)

    def forward(self, readings):
        return self.decide(sum(tower(readings[name]) for name, tower in self.towers.items()))


def by_name(model):
    return [p for _, p in sorted(model.named_parameters())]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(40)
    weight = {"lidar": torch.randn(8), "radar": torch.randn(8), "sonar": -torch.randn(8)}
    fusion = DistributedDataParallel(Fusion(discover_sensors(rank)))
    opt = torch.optim.Adam(fusion.parameters(), lr=4e-3)
    g = torch.Generator().manual_seed(17 + rank)
    losses = []
    for _ in range(60):
        readings = {name: torch.randn(48, 8, generator=g) for name in ("lidar", "radar", "sonar")}
        label = (sum(readings[n] @ weight[n] for n in sorted(weight)) > 0).long()
        loss = nn.functional.cross_entropy(fusion(readings), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in by_name(fusion.module)))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
