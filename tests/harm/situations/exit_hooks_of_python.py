"""excepthook, unraisablehook, destructors and finalizers until the very end."""

import atexit
import sys
import threading
import weakref

import torch
from _report import report, start, train
from torch import nn

seen = []


class Net(nn.Linear):
    def __del__(self):
        print("the model goes", flush=True)
        raise RuntimeError("in a destructor")


class Own(torch.optim.SGD):
    def __del__(self):
        print("the optimizer goes", flush=True)


def unraisable(found):
    print("unraisable", type(found.exc_value).__name__, found.exc_value, flush=True)


def thread_hook(found):
    seen.append(f"thread {found.exc_type.__name__}")


def fails():
    raise ValueError("in a thread")


def excepthook(kind, error, trace):
    print("excepthook", kind.__name__, error, seen, flush=True)


start()
sys.unraisablehook, threading.excepthook, sys.excepthook = unraisable, thread_hook, excepthook
dropped = Net(16, 4)
losses = train(dropped, torch.optim.SGD(dropped.parameters(), 0.01))
del dropped
model = Net(16, 4)
optimizer = Own(model.parameters(), 0.01)
losses += train(model, optimizer)
weakref.finalize(model, print, "a finalizer of the model")
watcher = weakref.ref(optimizer, lambda ref: print("a reference of the optimizer", flush=True))
atexit.register(print, "exit handler", flush=True)
thread = threading.Thread(target=fails)
thread.start()
thread.join()
report([model], [optimizer], losses)
raise LookupError("the end")
