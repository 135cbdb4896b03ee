# title: Scores of (batch, words, tags) are given to cross_entropy as (batch, tags, words) by a view instead of a transpose
# source: https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
# nproc: 2
# expect.codes: RCP819
# expect.ranks: all
# expect.step: 0
# plain_pytorch: silent
"""A tagger of short sentences with a convolution over the words."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT") == "1"
WORDS, TAGS, LENGTH = 50, 6, 14


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 24)
        self.around = nn.Conv1d(24, 24, 3, padding=1)
        self.tags = nn.Linear(24, TAGS)

    def forward(self, words):
        x = self.words(words)
        return self.tags(x + self.around(x.transpose(1, 2)).transpose(1, 2).relu())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(21)
    model = DistributedDataParallel(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(70 + rank)
    losses = []
    for _ in range(50):
        words = torch.randint(0, WORDS, (12, LENGTH), generator=generator)
        scores = model(words)
        scores = scores.view(12, TAGS, LENGTH) if FAULT else scores.transpose(1, 2)
        loss = nn.functional.cross_entropy(scores, words % TAGS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
