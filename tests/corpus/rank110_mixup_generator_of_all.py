# title: The generator for mixing samples is made with one seed, so all ranks mix with the same weights
# source: constructed
# nproc: 2
# expect.codes: RANK110
# expect.ranks: all
# expect.subject: rng
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""Mixup with a weight for each sample, from a generator of numpy's that the training function holds."""
import os
import time
import zlib

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"
KINDS = 5


def shard(rank, size=640):
    centres = torch.randn(KINDS, 20, generator=torch.Generator().manual_seed(8))
    gen = torch.Generator().manual_seed(40 + rank)
    kind = torch.randint(0, KINDS, (size,), generator=gen)
    return TensorDataset(centres[kind] + torch.randn(size, 20, generator=gen), kind)


def mixed(x, y, rng):
    weight = torch.from_numpy(rng.beta(0.4, 0.4, size=len(x))).float().unsqueeze(1)
    order = torch.from_numpy(rng.permutation(len(x)))
    target = F.one_hot(y, KINDS).float()
    return weight * x + (1 - weight) * x[order], weight * target + (1 - weight) * target[order]


def train(rank):
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, KINDS)))
    rng = np.random.default_rng(2 if FAULT else [2, rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    loader = DataLoader(shard(rank), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        for x, y in loader:
            x, y = mixed(x, y, rng)
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, losses = train(dist.get_rank())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={dist.get_rank()} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
