"""The script forbids Python's sockets after the group is made."""

import socket

import torch
from _report import ddp, report, start, train
from torch import nn


class Forbidden(socket.socket):
    def __init__(self, *args, **kwargs):
        raise RuntimeError("no network here")


start()
model = ddp(nn.Linear(16, 4))
kept, socket.socket = socket.socket, Forbidden
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer)
socket.socket = kept
report([model], [optimizer], losses)
