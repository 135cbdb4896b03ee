"""Sockets have a default timeout of the script's, and are of a class that counts; two ranks

ranks: 2
"""

import socket

import torch
import torch.distributed as dist
from _report import ddp, report, start, train
from torch import nn

start()
made = []


class Counted(socket.socket):
    def __init__(self, *args, **kwargs):
        made.append(1)
        super().__init__(*args, **kwargs)


kept = socket.socket
dist.init_process_group("gloo")
socket.setdefaulttimeout(0.001)
socket.socket = Counted
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = []
for _ in range(6):
    losses += train(model, optimizer)
model(torch.full((8, 16), float("nan")))
losses += train(model, optimizer)
socket.socket = kept
report([model], [optimizer], losses, timeout=socket.getdefaulttimeout())
del model
dist.destroy_process_group()
