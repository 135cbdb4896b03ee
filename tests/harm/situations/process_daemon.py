"""The script becomes a daemon before it trains: two forks, an own session, streams to files.

watched: no, what trains is a child
"""

import os
import sys

import torch
from _report import report, start, train
from torch import nn

start()
read, write = os.pipe()
child = os.fork()
if child:
    os.close(write)
    status = os.waitpid(child, 0)[1]
    with open(read) as done:
        done.read()  # until the grandchild has ended
    print(os.waitstatus_to_exitcode(status))
    print(open("daemon.log").read())
    sys.exit(4)
os.setsid()
if os.fork():
    os._exit(3)
start()  # Python has seeded its generator anew
log = os.open("daemon.log", os.O_CREAT | os.O_WRONLY, 0o600)
os.dup2(log, 1)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
report([model], [optimizer], losses)
sys.stdout.flush()
os._exit(0)
