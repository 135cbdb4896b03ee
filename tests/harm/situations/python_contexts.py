"""Context variables, decimal contexts and thread-locals in forwards, hooks and tasks."""

import asyncio
import concurrent.futures
import contextvars
import decimal
import threading

import torch
from _report import batches, report, start, train
from torch import nn

count = contextvars.ContextVar("count", default=0)
local = threading.local()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        count.set(count.get() + 1)
        local.calls = getattr(local, "calls", 0) + 1
        decimal.getcontext().prec += 1
        return self.layer(x)


def run(seed):
    losses.extend(train(model, optimizer, batches(10, seed=seed)))
    return count.get(), getattr(local, "calls", 0), decimal.getcontext().prec


def add(number):
    count.set(count.get() + number)


async def task(seed):
    for _ in range(3):
        losses.extend(train(model, optimizer, batches(2, seed=seed)))
        await asyncio.sleep(0)
    return count.get()


async def tasks():
    return [await asyncio.create_task(task(seed)) for seed in (7, 8)]


start()
model, losses = Net(), []
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model.layer.register_forward_hook(lambda *args: add(100))
found = [run(1), contextvars.copy_context().run(run, 2), run(3)]
with concurrent.futures.ThreadPoolExecutor(1, initializer=lambda: setattr(local, "calls", 1000)) as pool:
    found += [pool.submit(run, 4).result(), pool.submit(contextvars.copy_context().run, run, 5).result()]
found += [asyncio.run(tasks()), run(6), len(contextvars.copy_context())]
report([model], [optimizer], losses, found=found)
