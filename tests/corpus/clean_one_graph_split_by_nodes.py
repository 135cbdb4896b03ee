# title: Every rank feeds the whole graph and takes the loss over nodes of its own
# source: constructed
# nproc: 3
# expect.codes: none
# plain_pytorch: silent
"""The inputs of the forward are the same on all ranks in every step, on purpose; the shards are in the loss."""

import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 16), nn.Linear(16, 3)

    def forward(self, x, neighbours):
        return self.second(neighbours @ torch.relu(self.first(neighbours @ x)))


def graph(nodes=120):
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(nodes, 10, generator=gen)
    edges = (torch.rand(nodes, nodes, generator=gen) < 0.06).float() + torch.eye(nodes)
    edges /= edges.sum(1, keepdim=True)
    return x, edges, (edges @ x)[:, :3].argmax(1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x, edges, labels = graph()
    mine = torch.arange(len(x))[rank :: dist.get_world_size()]
    model = DDP(GraphNet())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        nodes = mine[torch.randperm(len(mine), generator=gen)[:16]]
        loss = nn.functional.cross_entropy(model(x, edges)[nodes], labels[nodes])
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
