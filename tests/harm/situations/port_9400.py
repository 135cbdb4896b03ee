"""The script serves on ports 9400 to 9403 itself, after training has begun."""

import socket

import torch
from _report import ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer)
bound = []
for port in range(9400, 9404):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        bound.append(server.getsockname()[1])
report([model], [optimizer], losses, bound=bound)
