"""torch.multiprocessing.spawn of two DDP ranks with loaders and workers, joined by hand.

run: alone
parts: all
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _report import digest, report, start
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def rank_main(rank, store, queue, ways):
    start()
    init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(48, 16, generator=torch.Generator().manual_seed(3)))
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, 6, sampler=sampler, num_workers=1, multiprocessing_context="fork"):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    state = digest(model.state_dict()), digest(torch.get_rng_state())
    name = mp.current_process().name, mp.current_process().daemon, sorted(ways)
    queue.put((rank, __name__, *name, len(sys.argv), state, sorted(vars(mp.current_process()))))
    dist.barrier()
    del model
    destroy_process_group()


if __name__ == "__main__":
    start()
    queue = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(rank_main, (os.path.abspath("store"), queue, {"way": 1}), 2, join=False)
    found = sorted(queue.get() for _ in range(2))
    while not context.join():
        pass
    print("ranks", *found, sep="\n")
    print("exits", [process.exitcode for process in context.processes])
    report()
