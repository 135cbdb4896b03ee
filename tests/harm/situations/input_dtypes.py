"""Batches of every dtype: bool, integers, half, float8, float64, complex."""

import torch
from _report import batches, ddp, report, start, train
from torch import nn


class Float(nn.Module):
    def forward(self, x):
        return x.abs().float() if x.is_complex() else x.float()


start()
model = ddp(nn.Sequential(nn.Identity(), Float(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
kinds = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
kinds += [torch.uint64, torch.half, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
kinds += [torch.complex64, torch.complex128, torch.complex32]
losses = []
for kind, x in zip(kinds, batches(len(kinds)), strict=True):
    losses += train(model, optimizer, [x.abs().to(kind)])
report([model], [optimizer], losses)
