"""Makes a process group, ends it, makes the next one on the same store, and trains in it; or stores of other kinds."""

import os
import random
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from common import finish, report
from torch import nn
from torch.distributed import FileStore, PrefixStore, Store, TCPStore
from torch.nn.parallel import DistributedDataParallel as DDP


class Mine(Store):
    """A store of the user's own: what it lacks ends in C++ as a pure virtual call."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        return self.inner.get(key)

    def add(self, key, number):
        return self.inner.add(key, number)

    def check(self, keys):
        return self.inner.check(keys)

    def wait(self, keys, timeout=None):
        self.inner.wait(keys) if timeout is None else self.inner.wait(keys, timeout)

    def set_timeout(self, timeout):
        self.inner.set_timeout(timeout)


def train(rank, steps, fault):
    torch.manual_seed(3)
    model = DDP(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if fault and step == 5 and rank == 1:
            model.module.weight.data[0, 0] += 1
        time.sleep(0.02)
    report([model.module], [optimizer], losses)


def main(kind):
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if kind == "file":
        store = FileStore("store", world)
    else:
        store = TCPStore(*address, world, is_master=rank == 0)
    mine = None
    if kind == "mine":
        mine = store = Mine(store)  # torch does not keep the Python half alive
    if kind == "again":
        for number in range(3):
            dist.init_process_group("gloo", store=PrefixStore(f"group{number}", store), rank=rank, world_size=world)
            model = DDP(nn.Linear(2, 2))
            del model
            dist.barrier()
            dist.destroy_process_group()
    dist.init_process_group("gloo", store=PrefixStore("last", store), rank=rank, world_size=world)
    train(rank, 200, fault=True)  # 4 s: the ranks have time to meet, whatever else runs
    finish()
    del mine


if __name__ == "__main__":
    main(sys.argv[1])
