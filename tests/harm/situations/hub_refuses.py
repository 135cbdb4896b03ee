"""A hub that refuses what is pushed: the job is told once, and goes on.

env: DDPDEBUG_HUB=http://127.0.0.1:18766
"""

import os
import signal
import socket
import sys
import time

import torch

# a process of its own answers in the place of the hub, and leaves with the script
here = os.getpid()
server = socket.create_server(("127.0.0.1", 18766), reuse_port=True)
if os.fork() == 0:
    kept = []
    server.settimeout(0.2)
    while os.getppid() == here:
        try:
            kept.append(server.accept()[0])
        except OSError:
            continue
        kept[-1].sendall(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        kept.pop().close()
    os._exit(0)
server.close()
heard = []
signal.signal(signal.SIGCHLD, lambda *_: heard.append("child"))
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    time.sleep(0.7)
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(float(model.weight.sum()), float(torch.rand(())), heard, socket.getdefaulttimeout(), flush=True)
sys.exit(7)
