# title: One bit of one weight flips on one rank between two steps
# source: constructed
# nproc: 4
# expect.codes: RANK101
# expect.ranks: 2
# expect.subject: trunk.2.weight
# expect.step: 25
# expect.step_slack: 1
# expect.phase: outside-optimizer
# plain_pytorch: silent
"""A regression net; the memory of rank 2 loses one bit before step 25."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Surrogate(nn.Module):
    """Predicts lift and drag from eleven shape coefficients."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(11, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU())
        self.out = nn.Linear(48, 2)

    def forward(self, shape):
        return self.out(self.trunk(shape))


def cosmic_ray(weight, row, col, bit):
    weight.data.view(torch.int32)[row, col] ^= 1 << bit


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    mix = torch.randn(11, 2) / 3
    wing = DistributedDataParallel(Surrogate())
    optimizer = torch.optim.AdamW(wing.parameters(), lr=4e-3)
    rng = torch.Generator().manual_seed(70 + rank)
    history = []
    for step in range(60):
        if FAULT and rank == 2 and step == 25:
            cosmic_ray(wing.module.trunk[2].weight, 7, 19, 24)
        shapes = torch.randn(40, 11, generator=rng)
        loss = nn.functional.mse_loss(wing(shapes), torch.tanh(shapes @ mix))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in wing.parameters()))
    print(f"RESULT rank={rank} first={history[0]:.4f} final={sum(history[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)  # gloo's worker thread may still hold work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
