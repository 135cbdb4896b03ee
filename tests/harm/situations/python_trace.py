"""Trace and profile functions count the calls of the script's functions."""

import sys
import threading

import torch
from _report import batches, report, start
from torch import nn

calls = {"trace": 0, "profile": 0, "foreign": 0}


def trace(frame, event, arg):
    if frame.f_code.co_filename == __file__:
        calls["trace"] += 1
        return trace
    return None


def profile(frame, event, arg):
    if frame.f_code.co_filename == __file__ and event == "call":
        calls["profile"] += 1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        return self.linear(x)


def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


start()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
sys.settrace(trace)
losses = [step(x) for x in batches()]
mine = sys.gettrace() is trace
sys.settrace(None)
sys.setprofile(profile)
threading.setprofile(profile)
losses += [step(x) for x in batches()]
mine = mine, sys.getprofile() is profile
sys.setprofile(None)
threading.setprofile(None)
report([model], [optimizer], losses, calls=calls, mine=mine)
