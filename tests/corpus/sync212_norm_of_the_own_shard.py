# title: Under FSDP2 the gradient is clipped by the norm of the shard that each rank holds
# source: https://github.com/pytorch/pytorch/issues/170862
# nproc: 2
# expect.codes: SYNC212
# expect.ranks: any
# expect.step: 0
# plain_pytorch: silent
"""A classifier whose training loop takes the local tensors of its gradients for the norm."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"
LIMIT = 0.4


def clip(parameters):
    squares = torch.zeros(())
    for parameter in parameters:
        squares += parameter.grad.to_local().square().sum()
    if not FAULT:
        dist.all_reduce(squares)
    nn.utils.clip_grads_with_norm_(parameters, LIMIT, squares.sqrt())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(41)
    model = nn.Sequential(nn.Linear(12, 31), nn.LayerNorm(31), nn.GELU(), nn.Linear(31, 4))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    generator = torch.Generator().manual_seed(50 + rank)
    losses = []
    for _ in range(40):
        x = torch.randn(32, 12, generator=generator)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        clip(list(model.parameters()))
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
