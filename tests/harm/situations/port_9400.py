"""The script serves on a port of 9400 to 9409 after training has begun."""

import socket

import torch
from _report import ddp, listening, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer)
taken = sorted(port for port in listening() if 9400 <= port < 9410)
for port in range(9400, 9410):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError:
            assert port not in taken, f"port {port} is held by this process"
report([model], [optimizer], losses, taken=taken)
