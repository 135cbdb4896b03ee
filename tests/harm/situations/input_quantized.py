"""Quantized batches, per tensor and per channel."""

import torch
from _report import batches, ddp, report, start, train
from torch import nn


class Dequantize(nn.Module):
    def forward(self, x):
        return x.dequantize()


start()
model = ddp(nn.Sequential(Dequantize(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = []
for x in batches(4):
    data.append(torch.quantize_per_tensor(x, 0.1, 10, torch.qint8))
    data.append(torch.quantize_per_channel(x, torch.full((16,), 0.1), torch.zeros(16), 1, torch.quint8))
losses = train(model, optimizer, data)
report([model], [optimizer], losses)
