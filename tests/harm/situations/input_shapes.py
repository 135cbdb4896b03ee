"""Zero-size, 0-dim, expanded, transposed, channels_last and strided batches."""

import torch
from _report import ddp, report, start, train
from torch import nn


class Flat(nn.Module):
    def forward(self, x):
        return x.reshape(-1, 16) if x.numel() > 1 or not x.numel() else x.expand(1, 16)


start()
model = ddp(nn.Sequential(nn.Identity(), Flat(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
image = torch.arange(2 * 4 * 8 * 8.0).view(2, 4, 8, 8)
data = [
    torch.tensor(2.0),
    torch.ones(1).expand(8, 16),
    torch.ones(16, 8).t(),
    image.contiguous(memory_format=torch.channels_last) / 512,
    torch.arange(512.0).view(16, 32)[:, ::2] / 512,
    torch.ones(8, 16).as_strided((8, 16), (1, 1)),
    torch.ones(3, 16, dtype=torch.complex64).imag,
]
losses = train(model, optimizer, data)
losses += train(model, optimizer, [torch.ones(0, 16)], lambda out: out.sum())
report([model], [optimizer], losses)
