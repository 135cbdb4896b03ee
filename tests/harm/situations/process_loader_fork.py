"""DataLoader workers by fork: persistent, large batches, a random worker_init_fn, an error.

slow: yes
"""

import gc

import torch
from _report import ddp, report, start, train
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        if i == 999:
            raise KeyError(i)
        return torch.full((16,), i / 64) + torch.randn(16) * 0.01


class Broken(Rows):
    def __getitem__(self, i):
        if i == 20:
            raise KeyError("sample 20")
        return super().__getitem__(i)


start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
loader = DataLoader(Rows(), 8, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=3)
losses = train(model, optimizer, loader) + train(model, optimizer, loader)
del loader
losses += train(model, optimizer, DataLoader(Rows(), 32, num_workers=2, worker_init_fn=lambda i: torch.manual_seed(i)))
caught = None
try:
    losses += train(model, optimizer, DataLoader(Broken(), 8, num_workers=1))
except KeyError as error:
    caught = "sample 20" in str(error)
gc.collect()
report([model], [optimizer], losses, caught=caught)
