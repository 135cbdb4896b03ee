"""Ranks that the script starts itself with torch.multiprocessing.spawn, a Trainer class, checkpoints by rank 0.

manner = "pytorch/examples, ddp-tutorial-series/multigpu.py; with a loss that trains"
run = "alone"

[[fault]]
name = "the batch runs through model.module"
old = "output = self.model(source)"
new = "output = self.model.module(source)"
codes = ["SYNC202"]
where = "output = self.model.module(source)"
"""
import os
import socket

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from _report import report
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    init_process_group(backend="gloo", rank=rank, world_size=world_size)


class Trainer:
    def __init__(self, model, train_data, optimizer, rank, save_every):
        self.train_data, self.optimizer, self.rank, self.save_every = train_data, optimizer, rank, save_every
        self.model = DDP(model)
        self.losses = []

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                torch.save(self.model.module.state_dict(), "checkpoint.pt")


def linear_data(size):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(size, 20, generator=generator)
    return TensorDataset(x, x[:, :5].sum(1, keepdim=True) - x[:, 5:8].sum(1, keepdim=True))


def main(rank, world_size, port):
    torch.set_num_threads(1)
    ddp_setup(rank, world_size, port)
    torch.manual_seed(0)
    dataset = linear_data(512)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-2)
    loader = DataLoader(dataset, batch_size=32, shuffle=False, sampler=DistributedSampler(dataset))
    trainer = Trainer(model, loader, optimizer, rank, save_every=2)
    trainer.train(5)
    if rank == 0:
        report([model], [optimizer], trainer.losses)
    trainer.model = None  # before the group ends, which gloo may not survive otherwise
    destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(main, args=(2, port), nprocs=2)
