"""What a script finds at its first line: frames, modules, children, handlers; and what its exit handlers find at last.

run: alone
"""

import sys

first = [name for name in sys.modules if name.partition(".")[0] != "ddpdebug"]
frame, frames = sys._getframe(), []
while frame is not None:
    frames.append((frame.f_code.co_name, frame.f_lineno))
    frame = frame.f_back
hooks = [sys.excepthook is sys.__excepthook__, hasattr(sys, "last_type"), hasattr(sys, "last_value"), sys.exc_info()]

import atexit
import inspect
import linecache
import os
import resource
import signal
import traceback
import warnings

used = resource.getrusage(resource.RUSAGE_CHILDREN)
children = [used.ru_utime + used.ru_stime, used.ru_maxrss, used.ru_nvcsw, *os.times()[2:4]]
handlers = [str(signal.getsignal(number)) for number in (signal.SIGCHLD, signal.SIGINT)]

import torch
from _report import report, start, train
from torch import nn


def outermost():
    warnings.warn("from beyond the first frame", stacklevel=4)
    return [(frame.name, frame.line) for frame in traceback.extract_stack()], len(inspect.stack())


def at_the_end():
    print(*sorted(name for name in globals() if name.startswith("__")), hasattr(sys, "last_value"))


start()
atexit.register(at_the_end)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
files = [name for name in linecache.cache if "runpy" in name or f"ddpdebug{os.sep}processes" in name]
report([model], [optimizer], losses, first=first, frames=frames, hooks=hooks, children=children)
report([], [], [], handlers=handlers, files=files, stack=outermost())
raise KeyError("the last word")
