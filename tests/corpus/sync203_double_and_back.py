# title: A round trip through double precision detaches the parameters from DDP's hooks
# source: https://github.com/pytorch/pytorch/issues/104336
# nproc: 2
# expect.codes: SYNC203, SYNC201, RANK101
# expect.ranks: all
# expect.subject: any
# expect.step: 24
# plain_pytorch: silent
"""Every 24 steps the condition number of the solution is measured in float64, in place."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Potential(nn.Module):
    """Energy of a chain of three particles from their distances."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 36), nn.Tanh(), nn.Linear(36, 36), nn.Tanh(), nn.Linear(36, 1))

    def forward(self, r):
        return self.net(r)


def reference(r):
    return (r[:, :1] - 1) ** 2 + (r[:, 1:2] - 1) ** 2 + 0.5 / (r[:, 2:] + 0.5)


def condition_number(model):
    m = model if FAULT else Potential()
    if not FAULT:
        m.load_state_dict(model.state_dict())
    m.double()
    number = torch.linalg.cond(m.net[2].weight.detach()).item()
    m.float()
    return number


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(47)
    energy = DistributedDataParallel(Potential())
    opt = torch.optim.Adam(energy.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(60):
        if step and step % 24 == 0:
            number = condition_number(energy.module)
            if rank == 0:
                print(f"step {step}: condition number {number:.1f}", flush=True)
        r = 0.5 + torch.rand(40, 3, generator=gen)
        loss = nn.functional.mse_loss(energy(r), reference(r))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in energy.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
