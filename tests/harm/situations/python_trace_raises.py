"""Trace and profile functions raise anywhere, and are caught."""

import sys

import torch
from _report import batches, start, train
from torch import nn


class TooLong(Exception):
    pass


raised, events = 0, 0


def raises(frame, event, arg):
    global raised, events
    file = frame.f_code.co_filename
    if event == "call" and (file == __file__ or "/torch/" in file):
        events += 1
        if events % 97 == 0:
            raised += 1
            raise TooLong


def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()


start()
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
train(model, optimizer)
for switch in (sys.settrace, sys.setprofile):
    raised = caught = 0
    for x in batches(60):
        torch.set_grad_enabled(True)  # the one before may have come while torch had it off
        switch(raises)
        try:
            step(x)
        except TooLong:
            caught += 1
        finally:
            switch(None)
    print(raised == caught, raised > 3)
