"""Trains on the CPU for so many seconds, with one thing wrong from step 60 on."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpdebug

NAME, SECONDS = sys.argv[1], float(sys.argv[2])
FAULT = 150
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
generator = torch.Generator().manual_seed(rank)
task = torch.randn(32, 8, generator=torch.Generator().manual_seed(7))
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=50, enabled=NAME in {"healthy", "nan"})
end = torch.tensor(time.time() + SECONDS, dtype=torch.float64)
dist.broadcast(end, 0)
if NAME == "slow" and rank == 2:  # a third of a step, in the forward
    model.module.register_forward_hook(lambda *_: time.sleep(0.1))
step = 0
while True:
    going = torch.tensor(float(time.time() < end))
    dist.broadcast(going, 0)
    if not going:
        break
    inputs = torch.randn(16, 32, generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=scaler.is_enabled()):
        loss = (model(inputs).float() - inputs @ task / 8 - 0.3 * torch.randn(16, 8, generator=generator)).square().mean()
    if NAME == "nan" and rank == 1 and step >= FAULT:
        loss = loss * float("nan")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if NAME == "nan":  # a mistake that is easily made: what the scaler finds is not heeded
        optimizer.step()
    else:
        scaler.step(optimizer)
    scaler.update()
    if step == FAULT and NAME in {"disagreeing", "ended"} and rank == 2:
        with torch.no_grad():
            model.module[0].weight[0, 0] += 1.0
    if step == FAULT and NAME == "killed" and rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == FAULT and NAME == "hung" and rank == 2:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # a deadlock
    if step == FAULT and NAME == "waiting" and rank == 2:  # an evaluation on one rank
        with torch.no_grad():
            while time.time() < end:
                model.module(torch.randn(16, 32))
    if step % 20 == 0:
        ddpdebug.observe(val_loss=loss.detach())
    time.sleep(0.2)
    step += 1
del model
dist.destroy_process_group()
