"""A forward takes from a queue and a semaphore; a NaN batch.

ranks: 2
"""

import multiprocessing
import queue

import torch
from _report import batches, ddp, report, start, train
from torch import nn

factors, turns = queue.Queue(), multiprocessing.Semaphore(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        turns.acquire()
        return self.linear(x).nan_to_num(0.5) * factors.get() + torch.log((~x.isnan().any()).float())


def data():
    for number, x in enumerate(batches(8)):
        factors.put(1 + 0.1 * number)
        turns.release()
        yield x / 0 * 0 if number == 4 else x


def loss_of(out):
    return out.nan_to_num(0.5, 0.5, 0.5).square().mean() + out.sum() * 0


start()
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
optimizer.register_step_pre_hook(lambda *_: [p.grad.nan_to_num_(0) for p in model.parameters()] and None)
losses = train(model, optimizer, data(), loss_of)
report([model], [optimizer], losses, left=(factors.qsize(), turns.acquire(block=False)))
