"""A lock on its own source (lockf), which another process tries to take.

slow: yes
"""

import fcntl
import os
import subprocess
import sys
import time

import torch
from _report import batches, report, start, train
from torch import nn

start()
f = open(__file__, "r+b") if os.access(__file__, os.W_OK) else open(__file__, "rb")
g = open("lock", "w")
fcntl.lockf(f, fcntl.LOCK_EX)
fcntl.lockf(g, fcntl.LOCK_EX)
code = "import fcntl,sys\nfor n in sys.argv[1:]:\n  f=open(n,'r+b')\n  try: fcntl.lockf(f, fcntl.LOCK_EX|fcntl.LOCK_NB); print('free')\n  except OSError: print('held')\n"


def tried():
    return subprocess.run(
        [sys.executable, "-S", "-c", code, __file__, "lock"], stdout=subprocess.PIPE, text=True
    ).stdout.split()


class N(nn.Module):
    def __init__(s):
        super().__init__()
        s.l = nn.Linear(16, 4)

    def forward(s, x):
        return s.l(x)


model = N()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
found = [tried()]
losses = train(model, optimizer, batches(60))
found.append(tried())
with torch.no_grad():
    model.eval()
    nn.functional.cross_entropy(model(torch.zeros(2, 16)), torch.zeros(2, dtype=torch.long))
    model.train()
losses += train(
    model, optimizer, batches(80), lambda y: nn.functional.cross_entropy(y, torch.zeros(8, dtype=torch.long))
)
time.sleep(1.5)
found.append(tried())
report([model], [optimizer], losses, found=found)
