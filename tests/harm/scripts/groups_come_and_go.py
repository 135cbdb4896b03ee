"""Two default process groups, one after the other; a subset group; models rebuilt; an exception caught."""

import gc
import os
import socket

import torch
import torch.distributed as dist
from common import batches, report, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(rank):
    model = nn.Linear(8, 8)
    ddp = DDP(model)
    optimizer = torch.optim.Adagrad(ddp.parameters(), lr=0.1)
    losses = []
    for i, x in enumerate(batches(rank, 5, 8, 8)):
        try:
            if i == 2:
                ddp("not a tensor")
        except TypeError as error:
            print("caught", type(error).__name__)
        loss = ddp(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    report([model], [optimizer], losses)


for seed in (13, 14):
    rank = setup(seed)
    train(rank)
    train(rank)
    alone = dist.new_group([1])
    if rank == 1:
        model = nn.Linear(3, 3)
        ddp = DDP(model, process_group=alone)
        ddp(torch.ones(2, 3)).sum().backward()
        print("alone", model.weight.grad.sum().item())
        del ddp
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
    if rank == 0:
        with socket.socket() as s:
            print("port is free again", s.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"]))) != 0)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
