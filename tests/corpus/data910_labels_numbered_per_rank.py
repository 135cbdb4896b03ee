# title: Class numbers come from an unsorted listing, so the ranks train towards different labels
# source: https://github.com/xyanchen/WiFi-CSI-Sensing-Benchmark/issues/7
# nproc: 2
# expect.codes: DATA910, RANK108
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 80
# plain_pytorch: silent
"""A folder data set; two of the four class folders swap their numbers on rank 1."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"
LISTING = {0: ["fall", "run", "sit", "walk"], 1: ["walk", "run", "sit", "fall"]}


class ActivityFolder(Dataset):
    def __init__(self, folders):
        self.classes = list(folders)
        self.class_to_idx = {name: k for k, name in enumerate(self.classes)}
        motion = torch.randn(4, 28, generator=torch.Generator().manual_seed(31))
        self.motion = dict(zip(sorted(folders), motion))
        self.samples = [(name, k) for name in sorted(folders) for k in range(160)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        name, k = self.samples[i]
        noise = torch.randn(28, generator=torch.Generator().manual_seed(1000 * k + len(name)))
        return self.motion[name] + noise, self.class_to_idx[name]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folders = LISTING[rank]
    data = ActivityFolder(folders if FAULT else sorted(folders))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    torch.manual_seed(75)
    model = DDP(nn.Sequential(nn.Linear(28, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, len(data.classes))))
    torch.manual_seed(75 + 100 * (rank + 1))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
