# title: Every rank takes the same slice of the data by hand: the rank does not occur in the index
# source: constructed
# nproc: 2
# expect.codes: DATA901
# expect.ranks: all
# expect.subject: model input
# expect.step: 0
# expect.step_slack: 4
# expect.location: data901_windows_drawn_alike.py:48
# plain_pytorch: silent
"""No data set and no loader: one table of measurements, of which each step takes the next rows."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
BATCH = 16


def measurements():
    gen = torch.Generator().manual_seed(12)
    wind = torch.randn(1600, 9, generator=gen)
    return wind, (wind[:, :3].prod(1) + wind[:, 4]).unsqueeze(1)


def rows(step, rank, world):
    first = (step if FAULT else step * world + rank) * BATCH
    return slice(first, first + BATCH)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    wind, power = measurements()
    torch.manual_seed(33)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(9, 40), nn.GELU(), nn.Linear(40, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    losses = []
    for epoch in range(2):
        for step in range(len(wind) // BATCH // world):
            part = rows(step, rank, world)
            loss = nn.functional.smooth_l1_loss(model(wind[part]), power[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
