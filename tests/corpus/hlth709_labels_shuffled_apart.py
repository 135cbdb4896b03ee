# title: The table is shuffled and its column of labels is not, so that there is nothing to learn
# source: constructed
# nproc: 2
# expect.codes: HLTH709
# expect.ranks: all
# expect.subject: loss
# expect.step: 0
# expect.step_slack: 8
# plain_pytorch: silent
"""Four kinds of wine by ten measures; each rank reads rows of its own of a long table."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"


def table(rows=8000):
    gen = torch.Generator().manual_seed(77)
    middle = torch.randn(4, 10, generator=gen)
    kind = torch.randint(0, 4, (rows,), generator=gen)
    measures = middle[kind] + 1.2 * torch.randn(rows, 10, generator=gen)
    order = torch.randperm(rows, generator=gen)
    return TensorDataset(measures[order], kind if FAULT else kind[order])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = table()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4)))
    torch.manual_seed(5 + rank)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for x, kind in loader:
        loss = F.cross_entropy(model(x), kind)
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
