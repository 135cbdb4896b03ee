# title: A data set caches what it has decoded, once in each loader worker
# source: https://github.com/pytorch/pytorch/issues/13246
# nproc: 2
# expect.codes: MEM406
# expect.ranks: all
# expect.subject: Pictures
# expect.step: 0
# expect.step_slack: 40
# plain_pytorch: silent
"""Synthetic pictures are 'decoded' in two loader workers; every index is new, so that the cache never hits."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"


class Pictures(Dataset):
    def __init__(self, length):
        self.length, self.decoded = length, {}

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        gen = torch.Generator().manual_seed(index)
        picture = torch.rand(3, 64, 64, generator=gen)
        if FAULT:
            self.decoded[index] = picture
        return picture.mean((1, 2)), picture[0, 0, 0] * 2 - 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(16)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1)))
    opt = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    data = Pictures(16 * 72 * dist.get_world_size())
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2)
    track = []
    for x, y in loader:
        loss = nn.functional.mse_loss(ddp(x).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        track.append(loss.item())
    first, final = track[0], track[-1]
    crc = 0
    for tensor in ddp.parameters():
        crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
    print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
