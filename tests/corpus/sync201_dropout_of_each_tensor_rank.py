# title: Ranks of tensor parallelism drop out other elements of what they all hold
# source: constructed
# nproc: 2
# expect.codes: SYNC201
# expect.ranks: any
# expect.subject: norm
# expect.step: 0
# plain_pytorch: silent
"""A residual network cut into columns and rows, seeded by rank after it was built."""
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

FAULT = os.environ.get("FAULT", "0") == "1"


class Layer(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(self.up(self.norm(x)).relu()))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(10, 24), Layer(), Layer(), nn.Linear(24, 4))
    for layer in model[1:3]:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(100 + (rank if FAULT else 0))
    gen = torch.Generator().manual_seed(4)
    losses = []
    for _ in range(40):
        x = torch.randn(32, 10, generator=gen)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
