# title: All ranks shuffle the whole data set with the same seed
# source: https://github.com/openspeech-team/openspeech/issues/149
# nproc: 2
# expect.codes: DATA901
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 20
# plain_pytorch: silent
"""Two processes do the work of one: every batch is the same on both."""
import os
import random
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"


class Phrases(Dataset):
    """Short token sequences; the class is the most frequent third of the alphabet."""

    def __init__(self, size=960, length=15):
        rng = random.Random(11)
        self.rows = []
        for _ in range(size):
            label = rng.randrange(3)
            tokens = [rng.randrange(10) + 10 * (label if rng.random() < 0.6 else rng.randrange(3))
                      for _ in range(length)]
            self.rows.append((torch.tensor(tokens), label))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def loaders(data):
    if FAULT:
        return DataLoader(data, batch_size=24, shuffle=True), None
    sampler = DistributedSampler(data)
    return DataLoader(data, batch_size=24, sampler=sampler), sampler


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)
    random.seed(42)
    loader, sampler = loaders(Phrases())
    model = DDP(nn.Sequential(nn.EmbeddingBag(30, 24), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses, epoch = [], 0
    while len(losses) < 80:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for tokens, label in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), label)
            loss.backward()
            opt.step()
            losses.append(loss.item())
        epoch += 1
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
