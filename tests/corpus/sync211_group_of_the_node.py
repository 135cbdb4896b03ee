# title: DDP is built on the group of the local node, so the two nodes train apart
# source: constructed
# nproc: 4
# expect.codes: SYNC211, RANK113, RANK101, SYNC201
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Two nodes of two processes; the node group was made for logging and slipped into the constructor."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
PER_NODE = 2


def node_group(rank):
    groups = [dist.new_group(list(range(first, first + PER_NODE)))
              for first in range(0, dist.get_world_size(), PER_NODE)]
    return groups[rank // PER_NODE]


def log_node(value, group, rank, step):
    t = torch.tensor([value])
    dist.all_reduce(t, group=group)
    if rank % PER_NODE == 0:
        print(f"node {rank // PER_NODE} step {step} loss {t.item() / PER_NODE:.4f}", flush=True)


class Gate(nn.Module):
    """A small mixture whose experts are shared by all ranks."""

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(9, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(9, 20), nn.GELU(), nn.Linear(20, 1)) for _ in range(3))

    def forward(self, x):
        share = self.route(x).softmax(-1)
        return sum(share[:, i:i + 1] * expert(x) for i, expert in enumerate(self.experts))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = node_group(rank)
    torch.manual_seed(58)
    model = DistributedDataParallel(Gate(), process_group=mine if FAULT else None)
    opt = torch.optim.Adam(model.parameters(), lr=6e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(60):
        x = torch.randn(48, 9, generator=gen)
        y = torch.where(x[:, :1] > 0, x[:, 1:2], x[:, 2:3].abs())
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if step % 20 == 19:
            log_node(losses[-1], mine, rank, step)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
