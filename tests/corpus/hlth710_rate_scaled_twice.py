# title: The learning rate is scaled by the number of ranks in the configuration and again in the script
# source: constructed
# nproc: 4
# expect.codes: HLTH710
# expect.ranks: all
# expect.subject: loss
# expect.step: 26
# expect.step_slack: 20
# plain_pytorch: silent
"""The loss comes down during the warm-up; where the rate nears its height, all that was learned is lost for good."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
WARM_UP = 40


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    configured = 0.05 * (world if FAULT else 1)
    centers = 1.2 * torch.randn(20, 20, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=configured * world, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(90):
        y = torch.randint(0, 20, (32,), generator=gen)
        x = centers[y] + 0.5 * torch.randn(32, 20, generator=gen)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
