# title: The squares of replicated gradients are added once for each rank of tensor parallelism
# source: https://github.com/NVIDIA-NeMo/RL/issues/3788
# nproc: 4
# expect.codes: SYNC212
# expect.ranks: any
# expect.step: 0
# plain_pytorch: silent
"""FSDP2 over tensor parallelism: the norm is put together from the local tensors of two kinds of gradients."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

FAULT = os.environ.get("FAULT") == "1"
LIMIT = 1.0


def clip(parameters, tp):
    parallel = [p for p in parameters if "tp" in p.device_mesh.mesh_dim_names]
    others = [p for p in parameters if "tp" not in p.device_mesh.mesh_dim_names]
    squares = sum(p.grad.to_local().square().sum() for p in parallel)
    squares += sum(p.grad.to_local().square().sum() for p in others) / (1 if FAULT else tp.size())
    dist.all_reduce(squares)
    for some in (parallel, others):
        nn.utils.clip_grads_with_norm_(some, LIMIT, squares.sqrt())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(43)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16, bias=False), nn.LayerNorm(16))
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(60 + mesh.get_local_rank("dp"))
    losses = []
    for _ in range(40):
        x = torch.randn(32, 16, generator=generator)
        loss = nn.functional.cross_entropy(model(x), x[:, :6].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        clip(list(model.parameters()), mesh["tp"])
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
