"""A subreaper waits for all its children; NaN comes.

run: alone
"""

import ctypes
import os
import signal
import subprocess
import time

SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)

import torch  # noqa: E402
from _report import batches, report, start, train  # noqa: E402
from torch import nn  # noqa: E402

start()
ends = []
signal.signal(signal.SIGCHLD, lambda *_: ends.append(1))
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = list(batches(60))
data[5][0, 0] = float("nan")
losses = train(model, optimizer, data[:30])
time.sleep(1)  # whatever ddpdebug starts is there
losses += train(model, optimizer, data[30:])


def wait_for_all():
    count = 0
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return count
        count += 1


counts = [wait_for_all(), len(ends)]
subprocess.run(["sh", "-c", "sleep 0.3 & exit 0"], check=True)
counts += [wait_for_all(), len(ends)]
report([model], [optimizer], losses, counts=counts)
