"""Anomaly detection, deterministic algorithms, warn_always, autograd without its threads."""

import torch
from _report import batches, ddp, report, start
from torch import nn

start()
torch.use_deterministic_algorithms(True)
torch.set_warn_always(True)
inner = nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.LazyLinear(4))
inner(torch.zeros(1, 16, dtype=torch.int64))
model = ddp(inner)
optimizer = torch.optim.Adam(model.parameters())
losses = []
with torch.autograd.set_multithreading_enabled(False), torch.autograd.detect_anomaly(check_nan=True):
    for x in batches():
        loss = model(x.abs().mul(5).long().clamp(max=15)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
report([model], [optimizer], losses)
