# title: Uneven inputs handled with Join: the rank that runs out of data shadows the others
# source: https://pytorch.org/tutorials/advanced/generic_join.html
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Rank 1 has ten batches more; rank 0 only answers its collectives until it is done."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(rank):
    gen = torch.Generator().manual_seed(rank)
    for _ in range(50 + 10 * rank):
        x = torch.randn(32, 7, generator=gen)
        yield x, (x[:, 0] * x[:, 1] > 0).long()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(15)
    model = DDP(nn.Sequential(nn.Linear(7, 48), nn.ReLU(), nn.Linear(48, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    with Join([model]):
        for x, y in batches(rank):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} "
          f"steps={len(losses)}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
