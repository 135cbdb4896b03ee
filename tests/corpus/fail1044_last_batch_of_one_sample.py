# title: The last batch of an epoch holds one sample, which batch normalisation cannot take
# source: https://github.com/yassouali/pytorch-segmentation/issues/8
# nproc: 2
# expect.codes: FAIL1044
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: error
"""Each rank has 33 of 66 pictures, in batches of 16: the third one is a single picture."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gen = torch.Generator().manual_seed(12)
    kind = torch.arange(66) % 3
    pictures = torch.randn(66, 3, generator=gen) * 0.4 + nn.functional.one_hot(kind, 3) * 2
    data = TensorDataset(pictures[:, :, None, None].expand(-1, -1, 6, 6).clone(), kind)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler) if FAULT else DataLoader(data, 16, sampler=sampler, drop_last=True)
    torch.manual_seed(2)
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 24), nn.BatchNorm1d(24), nn.ELU(),
                        nn.Linear(24, 3))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    curve = []
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            curve.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
