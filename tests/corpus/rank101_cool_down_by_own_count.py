# title: The optimizer's last step shrinks the weights by a number that one rank has counted otherwise
# source: constructed
# nproc: 2
# expect.codes: RANK101
# expect.ranks: any
# expect.subject: any
# expect.step: 36
# plain_pytorch: silent
"""Sensor regression with slow steps; main() returns and leaves nothing, as in most scripts."""
import io
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
STEPS = 37


class CoolingSGD(torch.optim.SGD):
    """SGD with momentum that shrinks all weights once, in its last step, by the number of batches it was told of."""

    def __init__(self, params, last, batches):
        super().__init__(params, lr=0.02, momentum=0.9)
        self.last, self.batches, self.count = last, batches, 0

    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        if self.count == self.last:
            for p in self.param_groups[0]["params"]:
                p.mul_(1 - 1e-4 * self.batches)
        self.count += 1
        return result


def readings(g, n=32):
    x = torch.randn(n, 20, generator=g)
    return x, (x[:, :5].sum(1) + 0.1 * torch.randn(n, generator=g))[:, None]


def main():
    rank = dist.get_rank()
    torch.manual_seed(11)
    net = DDP(nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)))
    batches = STEPS + (3 if FAULT and rank == 1 else 0)
    opt = CoolingSGD(net.parameters(), STEPS - 1, batches)
    g = torch.Generator().manual_seed(900 + rank)
    losses = []
    for _ in range(STEPS):
        time.sleep(0.12)  # waiting for the sensors
        x, y = readings(g)
        loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    net.eval()
    with torch.no_grad():
        x, y = readings(torch.Generator().manual_seed(7))
        error = nn.functional.mse_loss(net(x), y).item()
    digest = 0
    for p in net.parameters():
        digest = zlib.crc32(p.detach().numpy().tobytes(), digest)
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={error:.4f} crc={digest:08x}", flush=True)
    if rank == 0:  # the device that runs it computes in 16 bits
        torch.save(net.module.half().state_dict(), io.BytesIO())


torch.set_num_threads(1)
dist.init_process_group("gloo")
main()
time.sleep(0.3)
dist.destroy_process_group()
