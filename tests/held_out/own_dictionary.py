# title: Every rank counts the words of the part that it reads first, and numbers them by how often they occur there
# source: constructed
# nproc: 2
# expect.codes: DATA910
# expect.ranks: any
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Sentences of three topics; words become numbers by a dictionary that is made when the job starts."""
import collections
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = os.environ.get("FAULT") == "1"
WORDS = [a + b for a in "bdfgklmn" for b in ("a", "e", "i", "o", "u")]


def sentences(n=768):
    chance = random.Random(8)
    for _ in range(n):
        topic = chance.randrange(3)
        yield [WORDS[min(39, int(chance.triangular(0, 40, 6 + 14 * topic)))] for _ in range(9)], topic


class Sentences(Dataset):
    def __init__(self, rank, world):
        self.rows = list(sentences())
        seen = self.rows[rank::world] if FAULT else self.rows
        counts = collections.Counter(word for words, _ in seen for word in words)
        self.number = {word: i + 1 for i, (word, _) in enumerate(counts.most_common())}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        words, topic = self.rows[i]
        return torch.tensor([self.number.get(w, 0) for w in words]), topic


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = Sentences(rank, world)
sampler = DistributedSampler(data, world, rank, seed=1)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.EmbeddingBag(41, 16), nn.Linear(16, 3)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for numbers, topic in DataLoader(data, batch_size=24, sampler=sampler):
        loss = nn.functional.cross_entropy(model(numbers), topic)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(f"rank {rank} {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
