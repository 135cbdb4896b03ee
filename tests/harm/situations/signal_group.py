"""A signal to the whole process group, which the script handles and its helper does not

run: alone
"""

import os
import signal
import subprocess
import sys

import torch
from _report import report, start, train
from torch import nn

start()
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
os.killpg(0, signal.SIGTERM)
ended = helper.wait()
losses += train(model, optimizer, [torch.full((8, 16), value) for value in (1.0, float("nan"), 2.0)])
report([model], [optimizer], losses, got=got, ended=ended)
