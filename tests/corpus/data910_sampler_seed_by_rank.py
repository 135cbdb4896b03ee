# title: Every rank gives its DistributedSampler another seed, so the shards overlap and samples are missed
# source: https://github.com/NVlabs/LongLive/issues/71
# nproc: 4
# expect.codes: DATA910
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 40
# plain_pytorch: silent
"""The seed is derived from the job's seed plus the rank and is used for everything."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"
SEED = 2020


def volumes():
    gen = torch.Generator().manual_seed(1)
    y = torch.randint(0, 2, (640,), generator=gen)
    x = torch.randn(640, 1, 6, 6, 6, generator=gen)
    x[:, :, 2:4, 2:4, 2:4] += 1.2 * y[:, None, None, None, None]
    return TensorDataset(x, y)


class Scan(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(1, 6, 3)
        self.fc = nn.Linear(6 * 64, 2)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).flatten(1))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    worker_seed = SEED + rank
    torch.manual_seed(SEED)
    model = DDP(Scan())
    torch.manual_seed(worker_seed)
    data = volumes()
    sampler = DistributedSampler(data, shuffle=True, seed=worker_seed if FAULT else SEED)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for epoch in range(6):
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


main()
