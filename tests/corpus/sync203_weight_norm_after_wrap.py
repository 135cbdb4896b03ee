# title: Weight normalisation is applied to the head after wrapping
# source: constructed
# nproc: 2
# expect.codes: SYNC203
# expect.ranks: all
# expect.subject: parametrizations.weight.original
# expect.step: 0
# plain_pytorch: silent
"""The parametrisation puts two new parameters in the place of the one that DDP knows."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.Tanh())
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Regressor()
    if not FAULT:
        nn.utils.parametrizations.weight_norm(net.head)
    model = DDP(net, find_unused_parameters=True)
    if FAULT:
        nn.utils.parametrizations.weight_norm(model.module.head)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(10 + rank)
    losses = []
    for _ in range(50):
        x = torch.randn(16, 12, generator=gen)
        loss = nn.functional.mse_loss(model(x), x[:, :3].sum(1, keepdim=True))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
