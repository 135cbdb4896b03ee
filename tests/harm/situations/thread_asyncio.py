"""Training inside an event loop, with tasks and a signal handler."""

import asyncio
import os
import signal

import torch
from _report import batches, report, start, train
from torch import nn


async def ticking():
    while True:
        ticks.append(1)
        await asyncio.sleep(0.001)


async def training():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, signals.append, "usr1")
    task = asyncio.create_task(ticking())
    losses = []
    for number, x in enumerate(batches(10)):
        losses += train(model, optimizer, [x])
        if number == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.002)
    losses += await loop.run_in_executor(None, train, model, optimizer, batches(3))
    task.cancel()
    return losses


start()
ticks, signals = [], []
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = asyncio.run(training())
report([model], [optimizer], losses, ticked=bool(ticks), signals=signals)
