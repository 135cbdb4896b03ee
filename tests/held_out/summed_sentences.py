# title: The loss is summed over tokens, and the threshold of clipping is that of a mean
# source: constructed
# nproc: 2
# expect.codes: HLTH707
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Part-of-speech tags of made-up sentences by an LSTM."""
import os

import torch
import torch.distributed as dist
from torch import nn

REDUCTION = "sum" if os.environ.get("FAULT") == "1" else "mean"


class Tagger(nn.Module):
    def __init__(self, words=40, tags=6, d=24):
        super().__init__()
        self.embedding = nn.Embedding(words, d)
        self.lstm = nn.LSTM(d, d, batch_first=True, bidirectional=True)
        self.project = nn.Linear(2 * d, tags)

    def forward(self, words):
        hidden, _ = self.lstm(self.embedding(words))
        return self.project(hidden).transpose(1, 2)


def sentences(generator):
    words = torch.randint(40, (24, 15), generator=generator)
    before = torch.cat([torch.zeros(24, 1, dtype=torch.long), words[:, :-1]], 1)
    return words, (words // 10 + before // 20) % 6


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tagger = nn.parallel.DistributedDataParallel(Tagger())
    criterion = nn.CrossEntropyLoss(reduction=REDUCTION)
    adam = torch.optim.Adam(tagger.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(80):
        words, tags = sentences(generator)
        adam.zero_grad()
        loss = criterion(tagger(words), tags)
        loss.backward()
        nn.utils.clip_grad_norm_(tagger.parameters(), max_norm=1.0)
        adam.step()
    print(f"rank {dist.get_rank()} {loss.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
