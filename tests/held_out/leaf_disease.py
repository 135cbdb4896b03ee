# title: The normalisation layer is put into eval mode for a rank's tiny last batch and stays there
# source: constructed
# nproc: 2
# expect.codes: RANK106
# expect.ranks: any
# expect.subject: any
# expect.module: norm
# expect.step: 12
# expect.step_slack: 1
# plain_pytorch: silent
"""Photographs of leaves; the ranks have shards of which the second ends in a batch of two."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT") == "1"


class LeafNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.head = nn.Linear(12 * 16, classes)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


def shard(rank):
    gen = torch.Generator().manual_seed(77 + rank)
    size = 192 if rank == 0 else 178
    label = torch.randint(0, 3, (size,), generator=gen)
    picture = torch.randn(size, 3, 8, 8, generator=gen)
    for kind in range(3):
        picture[label == kind, kind, 2:6, 2:6] += 1.0
    return picture, label


def train():
    rank = dist.get_rank()
    torch.manual_seed(2)
    net = LeafNet()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    pictures, labels = shard(rank)
    shuffle = torch.Generator().manual_seed(rank)
    for epoch in range(5):
        order = torch.randperm(len(labels), generator=shuffle)
        for picked in order.split(16):
            if len(picked) < 4:  # two pictures make no statistics
                if FAULT:
                    net.norm.eval()
                else:
                    picked = torch.cat([picked, order[:14]])
            loss = criterion(model(pictures[picked]), labels[picked])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"rank {rank} loss {loss.item():.4f}", flush=True)


dist.init_process_group("gloo")
train()
dist.barrier()
dist.destroy_process_group()
