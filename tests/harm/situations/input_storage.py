"""Batches in shared memory, a mapped file, read-only numpy memory."""

import warnings

import numpy as np
import torch
from _report import ddp, digest, report, start, train
from torch import nn

warnings.filterwarnings("ignore", message=".*not writable.*")
start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
np.full((8, 16), 0.5, dtype=np.float32).tofile("batch.bin")
array = np.linspace(0, 1, 128, dtype=np.float32).reshape(8, 16)
array.flags.writeable = False
wanted = torch.ones(8, 16, requires_grad=True)
data = [
    torch.ones(8, 16).share_memory_(),
    torch.from_file("batch.bin", shared=True, size=128).view(8, 16),
    torch.from_numpy(np.memmap("batch.bin", np.float32, "r", shape=(8, 16))),
    torch.from_numpy(array),
    wanted,
    torch.frombuffer(bytearray(512), dtype=torch.float32).view(8, 16),
]
losses = train(model, optimizer, data)
report([model], [optimizer], losses, wanted=digest(wanted.grad), shared=data[0].is_shared())
