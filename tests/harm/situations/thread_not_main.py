"""The training thread is not the main thread, which only waits."""

import concurrent.futures

import torch
from _report import batches, ddp, report, start, train
from torch import nn


def go():
    model = ddp(nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 4)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return model, optimizer, train(model, optimizer, batches(10))


start()
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    model, optimizer, losses = pool.submit(go).result()
report([model], [optimizer], losses)
