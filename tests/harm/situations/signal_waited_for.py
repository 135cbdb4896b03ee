"""A thread in sigwait; a wakeup descriptor."""

import os
import signal
import threading

import torch
from _report import batches, report, start, train
from torch import nn

MINE = {signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM}
got = []


def wait():
    for _ in range(6):
        got.append(signal.sigtimedwait(MINE, 20).si_signo)


start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer, batches(30))
signal.pthread_sigmask(signal.SIG_BLOCK, MINE)
waiter = threading.Thread(target=wait)
waiter.start()
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM) * 2:
    before = len(got)
    os.kill(os.getpid(), number)
    losses += train(model, optimizer, batches(3))
    while len(got) == before and waiter.is_alive():
        losses += train(model, optimizer, batches(0))
        waiter.join(0.01)
waiter.join()
read, write = os.pipe()
os.set_blocking(write, False)
handled = []
signal.signal(signal.SIGUSR2, lambda number, frame: handled.append(number))
old = signal.set_wakeup_fd(write)
for _ in range(5):
    signal.raise_signal(signal.SIGUSR2)
    losses += train(model, optimizer, batches(2))
seen = os.read(read, 100), signal.set_wakeup_fd(old), old
report([model], [optimizer], losses, got=got, seen=[seen[0], seen[1] == write, seen[2]], handled=len(handled))
