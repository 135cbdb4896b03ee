"""SIGTERM to torchrun while its ranks train; a rank handles it and saves.

run: torchrun
ranks: 2
"""

import os
import signal
import sys
import time

import torch
from _report import ddp, start, train
from torch import nn


def save(number, frame):
    os.write(1, f"saved by rank {rank}\n".encode())
    os._exit(0)


signal.signal(signal.SIGTERM, save)
start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
train(model, optimizer)
rank = torch.distributed.get_rank()
torch.distributed.barrier()
if rank == 0:
    time.sleep(0.5)
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
