"""Listens where many exporters do, after training has begun."""

import socket

import torch
from torch import nn

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
with socket.socket() as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 9400))
    listener.listen()
    print("listening")
