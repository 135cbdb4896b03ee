"""DTensor parameters on a mesh of one rank, beside a model in DDP.

ranks: 1
"""

import torch
from _report import batches, ddp, digest, report, start, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

start()
model = ddp(nn.Linear(16, 4))
mesh = init_device_mesh("cpu", (1,))
sharded = distribute_module(
    nn.Linear(16, 4),
    mesh,
    lambda name, module, mesh: [
        module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))
        for key, p in list(module._parameters.items())
    ],
)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
second = torch.optim.SGD(sharded.parameters(), 0.1, momentum=0.9)
losses = train(model, optimizer)
for x in batches():
    second.zero_grad()
    loss = sharded(distribute_tensor(x, mesh, [Shard(0)])).to_local().square().mean()
    loss.backward()
    second.step()
    losses.append(loss.detach())
report([model], [optimizer], losses, sharded=digest([p.to_local() for p in sharded.parameters()]))
