"""FSDP2 clipped by norms that the script computes; two ranks.

ranks: 2
parts: all
"""

import torch
import torch.distributed as dist
from _report import batches, digest, finish, group, report, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

start()
group()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
model = nn.Sequential(nn.Linear(16, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, 1))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
losses, norms = [], []
for i, x in enumerate(batches(8)):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])
    if i % 2:
        dist.all_reduce(norm.square_())
        norm.sqrt_()
    given = [*model.parameters()] if i < 4 else model.parameters()
    norms.append((norm, nn.utils.clip_grads_with_norm_(given, 0.05, total_norm=norm)))
    optimizer.step()
    losses.append(loss)
parts = [[p.to_local(), p.grad.to_local()] for p in model.parameters()]
calls = mesh.get_group("dp")._get_sequence_number_for_group()
report([], [], losses, parts=digest(parts), calls=calls, norm=digest([norm for norm, _ in norms]))
del model, optimizer, parts, norms, norm, loss, losses
finish()
