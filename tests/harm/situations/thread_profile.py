"""threading.setprofile and settrace of the script: in which threads they are called."""

import os
import sys
import threading
import time

import torch
from _report import batches, report, start, train
from torch import nn

seen = {}


def hook(frame, event, arg):
    if frame.f_code.co_filename == __file__ or threading.get_ident() != main:
        seen.setdefault(threading.get_ident(), set()).add(os.path.basename(frame.f_code.co_filename))


start()
main = threading.get_ident()
threading.setprofile(hook)
threading.settrace(hook)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer, batches(40))
time.sleep(1.5)  # a look of every thread of ours
thread = threading.Thread(target=lambda: time.sleep(0))
thread.start()
thread.join()
threading.settrace(None)
threading.setprofile(None)
report([model], [optimizer], losses, seen=[sorted(files) for files in seen.values()], hooks=[sys.gettrace()])
