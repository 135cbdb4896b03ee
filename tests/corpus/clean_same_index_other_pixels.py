# title: Under one index each rank gets other pixels (its own augmentation), batches sorted by length, and soft labels
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Three loaders in turn: noise that is fixed for a rank and an index, texts sorted by length, labels that are smoothed."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pictures(Dataset):
    def __init__(self, rank):
        self.rank = rank
        self.pictures = torch.randn(160, 20, generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return 160

    def __getitem__(self, i):
        noise = torch.randn(20, generator=torch.Generator().manual_seed(1000 * self.rank + i))
        return self.pictures[i] + 0.3 * noise, int(self.pictures[i, 0] > 0)


class Texts(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, i):
        return torch.full((3 + i % 14, 20), (i % 7 - 3) / 3), i % 2


class Softened(Pictures):
    def __getitem__(self, i):
        picture, kind = super().__getitem__(i)
        return picture, kind, 1.0 - 0.2 * torch.rand(()).item()


def by_length(samples):
    samples = sorted(samples, key=lambda sample: -len(sample[0]))
    texts = nn.utils.rnn.pad_sequence([text for text, _ in samples], batch_first=True)
    return texts.mean(1), torch.tensor([kind for _, kind in samples])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DDP(nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 2)))
    torch.manual_seed(40 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sets = [Pictures(rank), Texts(), Softened(rank)]
    samplers = [DistributedSampler(data) for data in sets]
    loaders = [DataLoader(d, 16, sampler=s, collate_fn=by_length if i == 1 else None)
               for i, (d, s) in enumerate(zip(sets, samplers))]
    losses = []
    for epoch in range(8):
        for loader, sampler in zip(loaders, samplers):
            sampler.set_epoch(epoch)
            for x, kind, *weights in loader:
                each = nn.functional.cross_entropy(model(x.float()), kind, reduction="none")
                loss = (each * weights[0]).mean() if weights else each.mean()
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
