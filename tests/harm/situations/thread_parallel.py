"""Three threads train three models at the same time."""

import threading

import torch
from _report import digest, start
from torch import nn

found = {}


def go(number):
    generator = torch.Generator().manual_seed(number)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    found[number] = digest(model.state_dict()), digest(optimizer.state_dict())


start()
threads = [threading.Thread(target=go, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("digests", [found.get(number) for number in range(3)])
