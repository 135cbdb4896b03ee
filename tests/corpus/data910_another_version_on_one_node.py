# title: One node has an older copy of the files: number i is another recording there
# source: constructed
# nproc: 3
# expect.codes: DATA910
# expect.ranks: 2
# expect.subject: any
# expect.step: 0
# expect.step_slack: 200
# plain_pytorch: silent
"""Recordings are read from files when they are asked for, by two workers; the data set itself holds a path and a number."""
import os
import struct
import tempfile
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"
COUNT, LENGTH = 180, 12


def write(path, version):
    """Write the table of recordings; in the first version one of them was there twice."""
    numbers = list(range(COUNT))
    if version == 1:
        numbers = [0, *numbers[:-1]]
    with open(path, "wb") as file:
        for number in numbers:
            wave = torch.randn(LENGTH, generator=torch.Generator().manual_seed(500 + number))
            file.write(struct.pack(f"<{LENGTH}fi", *wave.tolist(), int(wave[:4].sum() > wave[4:8].sum())))


class Recordings(Dataset):
    def __init__(self, path):
        self.path = path

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        size = 4 * LENGTH + 4
        with open(self.path, "rb") as file:
            file.seek(i * size)
            *wave, kind = struct.unpack(f"<{LENGTH}fi", file.read(size))
        return torch.tensor(wave), kind


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "recordings.bin")
        write(path, version=1 if FAULT and rank == 2 else 2)
        data = Recordings(path)
        sampler = DistributedSampler(data, seed=2)
        loader = DataLoader(data, batch_size=12, sampler=sampler, num_workers=2, persistent_workers=True)
        torch.manual_seed(6)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(LENGTH, 32), nn.Tanh(), nn.Linear(32, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        losses = []
        for epoch in range(8):
            sampler.set_epoch(epoch)
            for wave, kind in loader:
                loss = nn.functional.cross_entropy(model(wave), kind)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        del loader
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
