"""New threads for each epoch: a followed one, then another."""

import sys
import threading

import torch
from _report import digest, start
from torch import nn

MODELS, EPOCHS, STEPS = 3, 6, 12


def go(model, optimizer, generator, own, following):
    for step in range(STEPS):
        if step == 2:  # some have cleared gradients by then, others have not begun
            following.set()
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    del own


start()
sys.setswitchinterval(1e-5)
parts = []
for number in range(MODELS):
    generator = torch.Generator().manual_seed(number)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    parts.append((model, torch.optim.Adam(model.parameters(), 1e-2), generator))
for epoch in range(EPOCHS):
    threads = []
    for number in range(MODELS):
        begun = threading.Event()
        thread = threading.Thread(target=go, args=(*parts[(number + epoch) % MODELS], number, begun))
        thread.start()
        threads.append(thread)
        begun.wait()
    for thread in threads:
        thread.join()
print("digests", [(digest(model.state_dict()), digest(optimizer.state_dict())) for model, optimizer, _ in parts])
