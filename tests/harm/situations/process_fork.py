"""Forked children train, and end in different ways."""

import os
import sys

import torch
from _report import batches, ddp, digest, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses, ends = train(model, optimizer), []
for way in ("hard", "exit", "raise"):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        own = model.module
        train(own, optimizer, batches(4, seed=9))
        print(way, digest(own.state_dict()), flush=True)
        if way == "exit":
            sys.exit(4)
        if way == "raise":
            sys.stderr = open(os.devnull, "w")
            raise ValueError("in a child")
        os._exit(3)
    ends.append((way, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
losses += train(model, optimizer)
report([model], [optimizer], losses, ends=ends)
