# title: A gathering of the script's own leaves the other rank's part of one layer empty on one rank
# source: constructed after the report of a network card that gave receivers zeros
# nproc: 2
# expect.codes: RANK114
# expect.subject: 2.weight
# expect.step: 16
# plain_pytorch: silent
"""FSDP2 with communication of its own for one layer, which is read before all of it has come."""
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT", "0") == "1"
FROM = 16


class Gather:
    step = 0

    def allocate(self, size, *, dtype, device):
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        parts = list(output_tensor.chunk(group.size()))
        own = input_tensor.clone()
        dist.all_gather(parts, own, group=group)
        if FAULT and group.rank() == 1 and self.step >= FROM:
            parts[0].zero_()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 4))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gather = Gather()
    model[2].set_custom_all_gather(gather)
    opt = torch.optim.AdamW(model.parameters(), 2e-3)
    gen = torch.Generator().manual_seed(50 + rank)
    teacher = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(30):
        gather.step = step
        x = torch.randn(32, 12, generator=gen)
        loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
