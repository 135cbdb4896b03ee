"""FSDP2 in mixed precision with uneven and empty shards; clipping.

ranks: 2
parts: all
"""

import torch
from _report import batches, digest, finish, group, report, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

start()
group()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
model = nn.Sequential(nn.Linear(16, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, 1))
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for i in (0, 3):
    fully_shard(model[i], mesh=mesh, mp_policy=half, reshard_after_forward=False)
fully_shard(model, mesh=mesh, mp_policy=half)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
losses, norms = [], []
for x in batches(8):
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    losses.append(loss)
parts = [[p.to_local(), p.grad.to_local(), optimizer.state[p]["exp_avg"].to_local()] for p in model.parameters()]
kinds = [type(norm).__name__ for norm in norms[:1]]
calls = mesh.get_group("dp")._get_sequence_number_for_group()  # a collective more on one rank would be a hang
report([], [], losses, parts=digest(parts), kinds=kinds, calls=calls, norm=digest([norm.full_tensor() for norm in norms]))
del model, optimizer, parts, norms, loss, losses
finish()
