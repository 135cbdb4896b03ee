"""One of two spawned ranks raises; torch raises with its traceback.

run: alone
"""

import os
import time

import torch
import torch.multiprocessing as mp
from _report import start, train
from torch import nn
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel


def rank_main(rank, store):
    start()
    init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(16, 4))
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    if rank == 1:
        raise ValueError("of rank 1")
    time.sleep(200)


if __name__ == "__main__":
    start()
    try:
        mp.spawn(rank_main, (os.path.abspath("store"),), 2)
    finally:
        os.remove("store")
