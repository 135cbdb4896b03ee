"""Open files, destructors and a thread at the interpreter's end, in a check.

run: alone
command: check
"""

import atexit
import threading
import time
import weakref
import zipfile

import torch
from _report import report, start, train
from torch import nn


class Last:
    def __del__(self):
        print("destructor")


def later():
    threading.main_thread().join()
    time.sleep(0.2)
    print("thread")


start()
log = open("log.txt", "w")
raw = open("raw.bin", "wb")
archive = zipfile.ZipFile("archive.zip", "w")
archive.writestr("a", "a")
last = Last()
weakref.finalize(last, print, "finalizer")
atexit.register(print, "exit handler")
threading.Thread(target=later).start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
log.write("a line\n" * 10)
raw.write(b"x" * 1000)
report([model], [optimizer], losses)
