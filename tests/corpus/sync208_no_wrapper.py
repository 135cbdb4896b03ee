# title: The process group is initialised, metrics are averaged, but nobody wraps the model
# source: constructed
# nproc: 3
# expect.codes: SYNC208, SYNC201, RANK101
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Every rank trains a model of its own on its shard; the averaged loss in the log looks fine."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"


def letters():
    gen = torch.Generator().manual_seed(3)
    shapes = torch.randn(5, 25, generator=gen)
    y = torch.randint(0, 5, (960,), generator=gen)
    return TensorDataset(shapes[y] + torch.randn(960, 25, generator=gen), y)


def mean_over_ranks(value):
    t = torch.tensor(value)
    dist.all_reduce(t)
    return (t / dist.get_world_size()).item()


def setup():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(18)
    model = nn.Sequential(nn.Linear(25, 40), nn.ReLU(), nn.Linear(40, 5))
    if not FAULT:
        model = DistributedDataParallel(model)
    return model, torch.optim.Adam(model.parameters(), lr=3e-3)


def main():
    model, opt = setup()
    data = letters()
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
        average = mean_over_ranks(losses[-1])
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {average:.4f}", flush=True)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={dist.get_rank()} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}",
          flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
