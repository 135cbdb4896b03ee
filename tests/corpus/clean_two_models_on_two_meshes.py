# title: Two models of other widths, rates and data train on a half of the ranks each, sharded over it
# source: constructed
# nproc: 4
# expect.codes: none
# plain_pytorch: silent
"""One job, two taggers: each half of the ranks shards its own over two ranks and reads its own sentences."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = os.environ.get("FAULT") == "1"


class Sentences(Dataset):
    """Words of which the tag follows from the word and the one before."""

    def __init__(self, seed, words):
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, words, (320, 6), generator=generator)
        self.tags = (self.words + self.words.roll(1, 1)) % 4

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], self.tags[i]


class Tagger(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.mix(self.table(x))[0])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("language", "shard"))
    language, place = mesh.get_local_rank("language"), mesh.get_local_rank("shard")
    torch.manual_seed(30 + language)
    words = (12, 20)[language]
    model = Tagger(words, (16, 24)[language])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=(4e-3, 2e-3)[language])
    data = Sentences(70 + language, words)
    sampler = DistributedSampler(data, num_replicas=2, rank=place, seed=language)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
