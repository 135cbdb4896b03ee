"""A limit of processor time: SIGXCPU is handled once, the script saves and leaves.

slow: yes
"""

import resource
import signal
import sys

import torch
from _report import batches, start, train
from torch import nn

left = []
start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
spent = resource.getrusage(resource.RUSAGE_SELF)
signal.signal(signal.SIGXCPU, lambda number, frame: left.append(number))
seconds = int(spent.ru_utime + spent.ru_stime) + 3
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 30))
while not left:
    losses = train(model, optimizer, batches(20))
torch.save(model.state_dict(), "model.pt")
print("saved", left)
sys.exit(8)
