"""The script needs a clean `git status` before and after training."""

import subprocess
import sys

import torch
from _report import batches, report, start, train
from torch import nn


def status():
    words = ["git", "-c", "safe.directory=*", "status", "--porcelain", "--untracked-files=all"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


subprocess.run(["git", "init", "--quiet"], check=True)
before = status()
start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer, batches(30))
after = status()
report([model], [optimizer], losses, before=before, after=after)
if after:
    sys.exit("the work tree is not clean")
