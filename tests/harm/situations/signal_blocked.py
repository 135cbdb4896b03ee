"""SIGINT and SIGTERM are blocked while training; masks of all threads."""

import signal

import os
import torch
from _report import report, start, train
from torch import nn

start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
model = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
os.kill(os.getpid(), signal.SIGTERM)
losses += train(model, optimizer)
got = signal.sigtimedwait({signal.SIGTERM}, 5)
handlers = [(s.name, str(signal.getsignal(s))) for s in (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD)]
report([model], [optimizer], losses, got=got and got.si_signo, handlers=handlers)
