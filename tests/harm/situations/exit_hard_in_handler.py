"""An exit handler trains and ends the process by os._exit(6); a thread still trains

run: alone
"""

import atexit
import os
import sys
import threading
import time

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)


def leave():
    losses.extend(train(model, optimizer))
    report([model], [optimizer], losses)
    sys.stdout.flush()
    os._exit(6)


threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
atexit.register(leave)
