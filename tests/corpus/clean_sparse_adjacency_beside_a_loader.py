# title: A sparse matrix that is equal on all ranks goes into each forward, beside a batch of a loader
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Each rank has nodes' features of its own over one graph; a sparse tensor has no size in bytes."""

import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, adjacency, x):
        return self.second(torch.sparse.mm(adjacency, F.relu(self.first(x))) + self.first(x))


def main():
    torch.manual_seed(6)
    gen = torch.Generator().manual_seed(60)
    x = torch.randn(800, 6, generator=gen)
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 10, sampler=sampler)
    links = (torch.rand(10, 10, generator=gen) < 0.2).float().fill_diagonal_(1.0)
    adjacency = (links / links.sum(1, keepdim=True)).to_sparse()
    model = DDP(Net())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for feats, labels in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(adjacency, feats), labels)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
