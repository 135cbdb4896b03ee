"""Trials that are pruned by exceptions of every kind, groups of exceptions and generators; the best one trains on."""

import asyncio
import contextlib
import gc

import torch
from _report import report, start
from torch import nn


class Pruned(Exception):
    pass


class Stop(KeyboardInterrupt):
    pass


class Leave(SystemExit):
    pass


start()
caught, values = [], []


def trial(number):
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.01 * (number + 1))
    for step in range(6 + number):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        yield step, loss.detach(), model, optimizer
        optimizer.step()


def run(number, error):
    for step, loss, model, optimizer in trial(number):
        if step == 4:
            raise error(f"trial {number}")
        values.append(loss)
    return model, optimizer


for number, error in enumerate([Pruned, Stop, Leave, StopIteration, GeneratorExit, TimeoutError]):
    try:
        run(number, error)
    except BaseException as raised:
        caught.append((type(raised).__name__, str(raised), raised.__context__, getattr(raised, "__notes__", None)))
    gc.collect()


async def several():
    async with asyncio.TaskGroup() as group:
        for number in range(2):
            group.create_task(asyncio.to_thread(lambda: None))
            group.create_task(one(number))


async def one(number):
    for step, loss, *_ in trial(number):
        await asyncio.sleep(0)
        if step == 3:
            raise Pruned(number)
        values.append(loss)


if hasattr(asyncio, "TaskGroup"):
    with contextlib.suppress(BaseException):
        asyncio.run(several())
best = nn.Linear(16, 4)
optimizer = torch.optim.SGD(best.parameters(), 0.1)
for _ in range(6):
    optimizer.zero_grad()
    loss = best(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    values.append(loss.detach())
report([best], [optimizer], values, caught=caught)
