"""FSDP2 stays gathered through micro-batches, with prefetching and a gathering of the script's own.

ranks: 2
parts: all
"""

import torch
import torch.distributed as dist
from _report import batches, digest, finish, group, report, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Gather:
    calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        Gather.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


start()
group()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
model = nn.Sequential(nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 1))
for i in (0, 2, 4):
    fully_shard(model[i], mesh=mesh)
fully_shard(model, mesh=mesh)
model[2].set_custom_all_gather(Gather())
model[0].set_modules_to_forward_prefetch([model[2]])
model[4].set_modules_to_backward_prefetch([model[2]])
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
losses, versions = [], []
for x in batches(8):
    optimizer.zero_grad()
    for half in x.chunk(2):
        last = len(losses) % 2 == 1
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        loss = model(half).square().mean()
        loss.backward()
        losses.append(loss)
    versions.append([p._version for p in model.parameters()])
    optimizer.step()
parts = [[p.to_local(), p.grad.to_local()] for p in model.parameters()]
report([], [], losses, parts=digest(parts), gathers=Gather.calls, versions=versions)
del model, optimizer, parts, loss, losses
finish()
