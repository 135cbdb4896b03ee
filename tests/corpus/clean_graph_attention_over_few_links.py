# title: Attention over the links of a graph, most of whose nodes have one, and a sharp choice of a prototype
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Rows with one link have all their weight there, and a temperature of 0.05 is meant; each rank keeps the number of
nodes of its own batch, nearly always the same, in an attribute."""

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
NODES = 20


class Linked(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(inp, out), nn.Linear(inp, out), nn.Linear(inp, out)

    def forward(self, x, links):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / self.q.out_features**0.5
        return F.leaky_relu(scores.masked_fill(~links, -torch.inf).softmax(-1) @ self.v(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = Linked(6, 16), Linked(16, 16), nn.Linear(16, 3)
        self.prototypes, self.nodes = nn.Parameter(torch.randn(5, 16)), NODES

    def forward(self, x, links):
        h = self.second(self.first(x[:, : self.nodes], links), links)
        near = torch.softmax(-torch.cdist(h, self.prototypes.expand(len(h), -1, -1)) / 0.05, -1)
        return self.out(h + near @ self.prototypes)


def main():
    torch.manual_seed(4)
    gen = torch.Generator().manual_seed(40)
    x = torch.randn(400, NODES, 6, generator=gen)
    links = torch.eye(NODES, dtype=torch.bool).repeat(400, 1, 1)
    links[:, ::5] |= torch.rand(400, NODES // 5, NODES, generator=gen) < 0.2
    y = x[..., :3].argmax(-1)
    data = TensorDataset(x, links, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    model = DDP(Net())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    own = torch.Generator().manual_seed(rank)
    losses = []
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for feats, linked, labels in loader:
            # padding that is nearly always none: what is left of a batch's largest graph
            model.module.nodes = NODES - int(torch.rand((), generator=own) < 0.08)
            kept = model.module.nodes
            out = model(feats, linked[:, :kept, :kept])
            loss = F.cross_entropy(out.flatten(0, 1), labels[:, :kept].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
