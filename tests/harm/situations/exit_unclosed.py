"""Open files, destructors and a thread at the interpreter's end, in a check.

run: alone
command: check --nproc-per-node 1
"""

import atexit
import os
import threading
import time
import weakref
import zipfile

import torch
from _report import report, start, train
from torch import nn


class Last:
    def __init__(self):
        self.to = os.open("last.txt", os.O_CREAT | os.O_WRONLY)

    def __del__(self, write=os.write):  # what `print` needs may be gone by then, in an order that differs
        write(self.to, b"destructor\n")


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
