"""SIGHUP, SIGALRM, SIGUSR1, each in a child that trains.

watched: no, the children are no ranks
slow: yes
"""

import os
import signal

import torch
from _report import start, train
from torch import nn

start()
for number in (signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGPIPE):
    child = os.fork()
    if child == 0:
        model = nn.Linear(16, 4)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        train(model, optimizer)
        os.kill(os.getpid(), number)
        os._exit(0)
    print(number.name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
