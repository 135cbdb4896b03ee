"""A click model on tables of categories, read as a stream: every rank has shards of its own.

manner = "facebookresearch/dlrm and webdataset: embeddings, interactions, an IterableDataset that splits shards by node"
ranks = 2

[[fault]]
name = "the streams are not cut to one length, and one rank's shards are longer"
old = "itertools.islice(self.read(), self.limit)"
new = "itertools.islice(self.read(), None)"
codes = ["DATA905"]

[[fault]]
name = "the shards are not split by rank"
old = "self.shards[self.rank :: self.world]"
new = "self.shards[0 :: self.world]"
codes = ["DATA901"]
"""
import itertools

import torch
import torch.distributed as dist
from _report import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

SIZES, DENSE, DIM = (40, 25, 10), 6, 8


class Clicks(IterableDataset):
    """Shards have different lengths, as files have."""

    def __init__(self, rank, world, limit):
        self.shards, self.rank, self.world, self.limit = list(range(8)), rank, world, limit

    def read(self):
        truth = torch.Generator().manual_seed(121)
        effects = [torch.randn(size, generator=truth) for size in SIZES]
        slope = torch.randn(DENSE, generator=truth)
        for shard in self.shards[self.rank :: self.world]:
            g = torch.Generator().manual_seed(1000 + shard)
            for _ in range(380 + 40 * (shard % 2)):
                dense = torch.randn(DENSE, generator=g)
                sparse = torch.stack([torch.randint(0, size, (1,), generator=g)[0] for size in SIZES])
                score = dense @ slope * 0.5 + sum(effect[i] for effect, i in zip(effects, sparse))
                yield dense, sparse, (torch.rand(1, generator=g)[0] < torch.sigmoid(score)).float()

    def __iter__(self):
        return itertools.islice(self.read(), self.limit)


def mlp(*sizes):
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(size, DIM, mode="sum") for size in SIZES)
        self.bot_l = mlp(DENSE, 16, DIM)
        self.top_l = nn.Sequential(mlp(DIM + 6, 16), nn.Linear(16, 1))

    def forward(self, dense, sparse):
        x = self.bot_l(dense)
        T = torch.stack([x, *(emb(sparse[:, i : i + 1]) for i, emb in enumerate(self.emb_l))], 1)
        Z = T @ T.transpose(1, 2)
        li, lj = torch.tril_indices(4, 4, -1)
        return self.top_l(torch.cat([x, Z[:, li, lj]], 1)).squeeze(1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(DLRM())
    loader = DataLoader(Clicks(dist.get_rank(), dist.get_world_size(), 1472), batch_size=16)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.03)
    loss_fn = nn.BCEWithLogitsLoss()
    losses = []
    for epoch in range(1):
        for it, (dense, sparse, clicked) in enumerate(loader):
            loss = loss_fn(model(dense, sparse), clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if it % 10 == 0:
                print(f"Finished training it {it} of epoch {epoch}, loss {loss.item():.6f}")
    report([model.module], [optimizer], losses)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
