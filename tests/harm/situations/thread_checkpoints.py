"""Checkpoints are written by a pool of threads while training goes on; a service in a child is told each step."""

import atexit
import concurrent.futures
import io
import json
import os
import queue
import socket
import threading

import torch
from _report import digest, report, start
from torch import nn

start()
mine, its = socket.socketpair()
child = os.fork()
if not child:
    mine.close()
    lines = its.makefile("r").read().splitlines()
    os._exit(len(lines))
its.close()
records = queue.Queue()


def deliver():
    while (record := records.get()) is not None:
        mine.sendall(json.dumps(record).encode() + b"\n")


def finish():
    records.put(None)
    sender.join()
    mine.close()
    print("service", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), threading.active_count())


sender = threading.Thread(target=deliver, daemon=True)
sender.start()
atexit.register(finish)
pool = concurrent.futures.ThreadPoolExecutor(2)
saved = []


def save(step, state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return step, digest(state), len(buffer.getvalue())


model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
losses = []
for step in range(40):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    records.put({"step": step, "loss": loss.item()})
    if step % 4 == 0:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        saved.append(pool.submit(save, step, {"model": state, "step": step}))
report([model], [optimizer], losses, saved=[future.result() for future in saved])
