"""A stream whose length nobody knows, a sampler of the script's own that is never told the epoch, one batch for all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(dist.get_rank())
        return iter(torch.randn(12, 4, generator=generator))


class Shuffled(Sampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 24

    def __iter__(self):
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist())


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
own = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4, sampler=Shuffled())
same = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4)
for loader in (DataLoader(Stream(), batch_size=4), own, own, same):
    for batch in loader:
        x = batch if isinstance(batch, torch.Tensor) else batch[0]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
del model, optimizer
dist.destroy_process_group()
