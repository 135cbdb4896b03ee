"""A forward writes files, shared memory and pipes, forks and sends signals; a NaN batch."""

import glob
import mmap
import multiprocessing
import os
import signal
import threading

import torch
from _report import batches, report, start, train
from torch import nn

value, lock, guard = multiprocessing.Value("i", 0), multiprocessing.Lock(), threading.Lock()
shared = torch.zeros(4).share_memory_()
with open("mapped.bin", "wb") as file:
    file.write(bytes(4096))
mapped = mmap.mmap(os.open("mapped.bin", os.O_RDWR), 4096)
reader, writer = os.pipe()
log, signals = open("log.txt", "a"), []
signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))


def sends(x):
    os.kill(os.getpid(), signal.SIGUSR1)


def forks(x):
    child = os.fork()
    if child == 0:
        with open("children.txt", "a") as file:
            file.write("one\n")
        os._exit(0)
    os.waitpid(child, 0)


def writes(x):
    log.write("forward\n")
    log.flush()
    with open("state.txt", "w") as file:  # what is there is gone already where a second one fails
        file.write(f"{value.value}\n")
    os.makedirs(f"step-{len(glob.glob('step-*'))}")


def shares(x):
    with value.get_lock(), lock, guard:
        value.value += 1
    shared.add_(1)
    mapped[0] += 1
    os.write(writer, b"x")


class Model(nn.Module):
    def __init__(self, effect):
        super().__init__()
        self.linear, self.effect = nn.Linear(16, 4), effect

    def forward(self, x):
        self.effect(x)
        return torch.log(self.linear(x) * 0) if x.isnan().any() else self.linear(x) + shared


start()
models, optimizers, losses = [], [], []
for effect in (shares, writes, forks, sends):
    model = Model(effect)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = [x / 0 * 0 if number == 3 else x for number, x in enumerate(batches(5))]
    losses += train(model, optimizer, data)
    models.append(model)
    optimizers.append(optimizer)
os.close(writer)
seen = value.value, shared.tolist(), mapped[0], len(os.read(reader, 100)), len(signals)
seen += tuple(sorted(glob.glob("*.*") + glob.glob("step-*")))
report(models, optimizers, losses, seen=seen)
