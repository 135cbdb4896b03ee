# title: The router of a mixture of experts sees each rank's tokens only, and its gradient is not added up over the ranks
# source: https://github.com/pytorch/torchtitan/issues/2387
# nproc: 2
# expect.codes: SYNC201
# expect.ranks: any
# expect.subject: router.weight
# expect.step: 0
# plain_pytorch: silent
"""Tensor parallel experts over a sequence that is split between the ranks for the router."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

FAULT = os.environ.get("FAULT") == "1"


class Experts(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.router = nn.Linear(12, 2, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12)) for _ in range(2)])
        self.output = nn.Linear(12, 4)

    def forward(self, x):
        own = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).redistribute(self.mesh, [Shard(0)])
        weight = DTensor.from_local(self.router.weight, self.mesh, [Replicate()], run_check=False)
        placements = None if not FAULT else [Replicate()]
        weight = weight.to_local(grad_placements=[Partial()] if placements is None else placements)
        gates = DTensor.from_local(own.to_local() @ weight.T, self.mesh, [Shard(0)], run_check=False)
        gates = gates.full_tensor().softmax(-1)
        mixed = sum(gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return self.output(mixed)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(13)
    model = Experts(mesh)
    for expert in model.experts:
        parallelize_module(expert, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(21)  # both ranks compute with one model, and have the same batches
    losses = []
    for _ in range(40):
        x = torch.randn(16, 12, generator=generator)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for n, p in model.named_parameters() if "experts" not in n))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
