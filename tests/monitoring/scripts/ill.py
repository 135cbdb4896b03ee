"""Trains on the CPU and falls ill in many ways, one after the other."""

import contextlib
import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpdebug
from ddpdebug.probes import recorder

END = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
if len(sys.argv) > 2:
    Path(sys.argv[2], f"pid-{rank}").write_text(str(os.getpid()))
torch.manual_seed(0)


class Slow(nn.Module):
    seconds = 0.0

    def forward(self, inputs):
        time.sleep(self.seconds)
        return inputs


model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), Slow(), nn.Tanh(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=0.5, growth_interval=10_000)
generator = torch.Generator().manual_seed(rank)


def broken(*_: object, **__: object) -> float:
    raise RuntimeError("a part of ddpdebug that fails")


def heal() -> None:
    with torch.no_grad():
        for tensor in model.module.state_dict().values():
            dist.broadcast(tensor, 0)


kept_for_ever = []
for step in range(END):
    Slow.seconds = 0.3 if 150 <= step < 200 and rank == 3 else 0.0
    inputs = torch.randn(8, 16, generator=generator)
    with model.no_sync() if 250 <= step < 270 else contextlib.nullcontext():
        outputs = model(inputs)
        loss = outputs.square().mean()
        kept = [p.detach().clone() for p in model.parameters()]
        if 220 <= step < 240 and rank == 1:
            loss = loss * float("nan")
        optimizer.zero_grad()
        (loss if 220 <= step < 240 else scaler.scale(loss)).backward()
    if 220 <= step < 240:
        optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept):
                parameter.copy_(value)
        optimizer.state.clear()
    else:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
    time.sleep(0.05)
    if step == 40 and rank == 2:
        with torch.no_grad():
            model.module[0].weight[0, 0] += 1.0
    if step in (120, 270):
        heal()
        optimizer.state.clear()
    if step % 10 == 0:
        ddpdebug.observe(val_loss=loss.detach())
    if step == 290:
        time.sleep(15)
    if step == 300 and rank == 1:
        recorder.divisor = broken
    if step < 1000:
        kept_for_ever.append(torch.zeros(100_000))
    model.train(not (rank == 1 and 320 <= step < 330))
del model
gc.collect()
dist.destroy_process_group()
