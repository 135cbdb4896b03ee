"""FlopCounterMode and the memory of saved_tensors_hooks, read by the script."""

import torch
from _report import ddp, report, start, train
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)))
optimizer = torch.optim.Adam(model.parameters())
packed = []
with FlopCounterMode(display=False) as flops:
    losses = train(model, optimizer)
with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
    losses += train(model, optimizer)
report([model], [optimizer], losses, flops=flops.get_total_flops(), packed=len(packed))
