"""An uncaught exception, with the script's own excepthook.

run: alone
"""

import sys
import traceback

import torch
from _report import start, train
from torch import nn


def hook(kind, error, trace):
    frames = [(frame.name, frame.filename.rpartition("/")[2]) for frame in traceback.extract_tb(trace)]
    print("hook", kind.__name__, error, error.__cause__, frames, error.__notes__, flush=True)


def fail():
    try:
        {}["missing"]
    except KeyError as error:
        problem = ValueError("no such batch")
        problem.add_note("a note")
        raise problem from error


sys.excepthook = hook
start()
model = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
train(model, optimizer)
fail()
