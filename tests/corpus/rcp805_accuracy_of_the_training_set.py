# title: The accuracy on the training set is measured with dropout, after a warm-up that looks at the model in every step
# source: constructed
# nproc: 1
# expect.codes: RCP805
# expect.ranks: all
# expect.subject: any
# expect.step: 40
# expect.step_slack: 1
# expect.location: rcp805_accuracy_of_the_training_set.py:35
# plain_pytorch: silent
"""Grains by their measures. The first steps weight samples by how sure the model is, by three passes with dropout."""
import os
import time
import zlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"


def grains():
    gen = torch.Generator().manual_seed(23)
    measures = torch.randn(320, 7, generator=gen)
    return TensorDataset(measures, (measures @ torch.randn(7, 3, generator=gen)).argmax(1))


def accuracy(model, loader):
    if not FAULT:
        model.eval()
    right = 0
    with torch.no_grad():
        for measures, kind in loader:
            right += (model(measures).argmax(1) == kind).sum().item()
    model.train()
    return right / len(loader.dataset)


def sureness(model, measures):
    with torch.no_grad():
        several = torch.stack([model(measures).softmax(1) for _ in range(3)])
    return 1 / (1 + several.std(0).sum(1))


torch.set_num_threads(1)
torch.manual_seed(12)
model = nn.Sequential(nn.Linear(7, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
data = grains()
loader = DataLoader(data, batch_size=16, shuffle=True)
losses = []
for epoch in range(4):
    for measures, kind in loader:
        weight = sureness(model, measures) if epoch == 0 else torch.ones(len(kind))
        loss = (nn.functional.cross_entropy(model(measures), kind, reduction="none") * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if epoch:
        accuracy(model, DataLoader(data, batch_size=64))
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
