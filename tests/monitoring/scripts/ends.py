"""Trains on the CPU until it is told otherwise, or until it ends in the way that its first argument names."""

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel



def until(path):
    while not path.exists():
        time.sleep(0.2)


how, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
(folder / f"pid-{rank}").write_text(str(os.getpid()))
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
if how == "summed":  # nobody divides by the number of ranks
    work = lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])  # noqa: E731
    model.register_comm_hook(None, work)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(rank)
for step in range(60 if how == "finished" else 1_000_000):
    loss = model(torch.randn(16, 8, generator=generator)).square().mean()
    if step == 30 and rank == 1:
        if how == "failed":
            raise ValueError("no such sample")
        if how == "nan":
            loss = loss * float("nan")
        if how == "hangs":  # until somebody lets go of the lock
            lock = threading.Lock()
            lock.acquire()
            threading.Thread(target=lambda: until(folder / "go") or lock.release(), daemon=True).start()
            lock.acquire()
        if how == "evaluates":
            end = time.monotonic() + 60
            while time.monotonic() < end:
                model.module(torch.randn(16, 8))
    optimizer.zero_grad()
    loss.backward()
    if how == "unchecked":  # by hand: no step of an optimizer that anybody could see
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=1e-3)
    else:
        optimizer.step()
    time.sleep(0.1)
del model
dist.destroy_process_group()
