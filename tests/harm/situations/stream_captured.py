"""contextlib.redirect_stderr around a part of the training catches the script's lines only."""

import contextlib
import io
import sys

import torch
from _report import ddp, report, start, train
from torch import nn

start()
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    model = ddp(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses = train(model, optimizer)
    print("caught", file=sys.stderr)
report([model], [optimizer], losses, out=out.getvalue())
