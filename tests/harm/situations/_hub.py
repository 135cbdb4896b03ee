"""What answers in the place of a hub, and a short training that is pushed to it."""

import os
import signal
import socket
import time

import torch


def answers(port, said):
    """Let a process of its own take connections, and answer each with `said` or keep it; it leaves with the script."""
    here = os.getpid()
    server = socket.create_server(("127.0.0.1", port), reuse_port=True)
    if os.fork() == 0:
        kept = []
        server.settimeout(0.2)
        while os.getppid() == here:
            try:
                kept.append(server.accept()[0])
            except OSError:
                continue
            if said:
                kept[-1].sendall(said)
                kept.pop().close()
        os._exit(0)
    server.close()


def train():
    """Train for a few seconds and print what must be the same."""
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
