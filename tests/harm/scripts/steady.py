"""Trains for a while: steps, then what happens at the end or in the middle."""

import os
import shutil
import sys
import time

import torch
from common import batches, finish, report, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


def main(steps, what, pause=0.0):
    rank = setup(20)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 5))
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    losses = []
    data = DataLoader(list(batches(rank, steps, 8, 16, classes=5)), batch_size=None)
    for step, (x, y) in enumerate(data):
        if step == 4:
            sys.stdout.flush()
            os.write(1, b"step 4\n")  # one write: under a launcher lines of two ranks do not mix
            if what == "raise" and rank == 1:
                raise ValueError("bad batch")
            if what == "remove" and rank == 0:
                shutil.rmtree("ddpdebug-runs", ignore_errors=True)
            if what == "fault" and rank == 1:
                model[0].weight.data[0, 0] += 1
        loss = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        time.sleep(pause)
    report([model], [optimizer], losses)
    sys.stdout.flush()
    if what == "os._exit":
        os._exit(0)
    if what == "sys.exit":
        sys.exit(7)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:]))
    finish()
