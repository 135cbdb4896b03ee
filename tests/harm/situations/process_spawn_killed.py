"""One of two spawned ranks is killed; torch ends the other.

run: alone
"""

import os
import signal
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
        time.sleep(3)  # the ranks meet meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(200)


if __name__ == "__main__":
    start()
    try:
        mp.spawn(rank_main, (os.path.abspath("store"),), 2)
    finally:
        os.remove("store")
