# title: An iterable data set splits its records by worker and forgets the rank, so all ranks read the same stream
# source: https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset
# nproc: 3
# expect.codes: DATA901
# expect.ranks: all
# expect.subject: model input
# expect.step: 0
# expect.step_slack: 4
# expect.location: data901_stream_not_split.py:59
# plain_pytorch: silent
"""Sentences arrive one by one; each reader takes every n-th."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FAULT = os.environ.get("FAULT", "0") == "1"


class Sentences(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        reader, readers = (worker.id, worker.num_workers) if worker else (0, 1)
        if not FAULT:
            reader += readers * dist.get_rank() if dist.is_initialized() else 0
            readers *= dist.get_world_size() if dist.is_initialized() else 1
        for number in range(reader, self.count, readers):
            gen = torch.Generator().manual_seed(number)
            words = torch.randint(0, 60, (11,), generator=gen)
            yield words, int(words.float().mean() > 30)


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(60, 24), nn.Linear(24, 2)

    def forward(self, words):
        return self.head(self.words(words).relu())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = DistributedDataParallel(Judge())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for epoch in range(2):
        for words, label in DataLoader(Sentences(1200), batch_size=10):
            loss = nn.functional.cross_entropy(model(words), label)
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
