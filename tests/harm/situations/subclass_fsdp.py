"""FSDP2, DDP and tensor parallelism, a model each; gradients are clipped; two ranks.

ranks: 2
"""

import torch
from _report import batches, ddp, finish, report, start, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

start()
other = ddp(nn.Linear(16, 4))
mesh = init_device_mesh("cpu", (2,))
sharded = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
for layer in (sharded[0], sharded[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
parallel = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
losses, finals = [], []
for model in (sharded, other, parallel):
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(3):
        losses += train(model, optimizer, batches(4))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    finals += [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in model.parameters()]
weights = [float(value.sum()).hex() for value in finals]
report([], [], losses, weights=weights)
del other, sharded, parallel, model, optimizer
finish()
