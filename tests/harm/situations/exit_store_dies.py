"""The process that hosts the store is killed; two ranks train on.

ranks: 2
slow: yes
"""

import datetime
import os
import signal
import time

import torch
import torch.distributed as dist
from _report import batches, ddp, report, start, train
from torch import nn

start()
limit = datetime.timedelta(seconds=120)
address, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
host = os.fork() if rank == 0 else 0
if rank == 0 and host == 0:
    server = dist.TCPStore(address, port, 2, is_master=True, timeout=limit, wait_for_workers=False)
    time.sleep(600)
    os._exit(0)
store = dist.TCPStore(address, port, 2, is_master=False, timeout=limit)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
time.sleep(1.0)
if rank == 0:
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
losses += train(model, optimizer, batches(seed=7))
if rank == 1:
    time.sleep(4.0)
losses += train(model, optimizer, batches(seed=8))
report([model], [optimizer], losses)
time.sleep(2.0 * rank)
os._exit(0)
