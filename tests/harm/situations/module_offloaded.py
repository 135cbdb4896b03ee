"""Weights are swapped out to meta and files between steps, groups are exchanged, kernels of attention are chosen."""

import copy

import torch
from _report import report, start
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

start()
model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
losses = []
for step in range(16):
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = torch.empty(0)
    torch.save(kept, "swapped.pt")
    for p, data in zip(model.parameters(), torch.load("swapped.pt"), strict=True):
        p.data = data
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=bool(step % 3)):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 5, 16)).square().mean()
        loss.backward()
    if step == 8:
        optimizer.param_groups = copy.copy(optimizer.param_groups)
        optimizer.param_groups[0] = dict(optimizer.param_groups[0], lr=0.02)
    if step == 10:
        optimizer.state = copy.copy(optimizer.state)
    if step == 12:
        half = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = half[:4]
        optimizer.add_param_group({"params": half[4:], "lr": 0.001})
    optimizer.step()
    losses.append(loss.detach())
report([model], [optimizer], losses)
